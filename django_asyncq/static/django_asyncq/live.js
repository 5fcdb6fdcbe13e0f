"use strict";
// Keep a page alive: the content of each element with an id and `data-asyncq-live` is replaced by what the same address
// answers with the header below, every five seconds: these elements alone. A page has it where it includes "live.html".
// Nothing happens while the tab is hidden, or while updates are paused. An element with the focus, a selection, or a
// <details> that was opened or closed in it is left as it is. One that has others in it is replaced only when other
// ones have come.
{
    const EVERY_MS = 5000, LONGEST_MS = 60000, LIVE = "[data-asyncq-live][id]", SCROLLING = "pre, .asyncq-scroll";

    const all = (element, selector, value) => Array.from(element.querySelectorAll(selector), value);
    const isEqual = (one, other, selector, value) =>
        all(one, selector, value).join() === all(other, selector, value).join();

    function isInUse(old, fresh) {
        const selection = window.getSelection();
        return old.contains(document.activeElement) || !isEqual(old, fresh, "details", (each) => each.open) ||
            (!selection.isCollapsed && old.contains(selection.anchorNode));
    }

    function renew(old, fresh) {
        const hasParts = old.querySelector(LIVE) !== null && isEqual(old, fresh, LIVE, (each) => each.id);
        if (hasParts || fresh.innerHTML === old.innerHTML || isInUse(old, fresh)) return;
        const places = all(old, SCROLLING, (each) => [each.scrollLeft, each.scrollTop]);
        old.replaceChildren(...fresh.childNodes);
        all(old, SCROLLING, (each, index) => [each.scrollLeft, each.scrollTop] = places[index] ?? [0, 0]);
    }

    // Returns whether nothing of the page will change any more.
    function renewAll(text) {
        const page = new DOMParser().parseFromString(text, "text/html");
        document.querySelectorAll(LIVE).forEach((old) => {
            const fresh = page.getElementById(old.id);
            if (fresh !== null) renew(old, fresh);
        });
        document.dispatchEvent(new Event("asyncq-renewed"));
        return page.querySelector("[data-asyncq-finished]") !== null;
    }

    function start(bar) {
        const text = bar.querySelector(".asyncq-live-text"), button = bar.querySelector("button");
        let updatedAt = Date.now(), waitMs = EVERY_MS, nextAt = updatedAt + waitMs, isPaused = false, isAsking = false;
        const clock = setInterval(tick, 1000);

        async function update() {
            isAsking = true;
            try {
                const headers = {"Asyncq-Live": "1"};
                const answer = await fetch(window.location.href, {credentials: "same-origin", redirect: "error", headers});
                if (!answer.ok) throw new Error(answer.status);
                if (renewAll(await answer.text())) {
                    clearInterval(clock);
                    bar.hidden = true;
                }
                [updatedAt, waitMs] = [Date.now(), EVERY_MS];
            } catch {
                waitMs = Math.min(2 * waitMs, LONGEST_MS);
            }
            isAsking = false;
            nextAt = Date.now() + waitMs;
        }

        function show() {
            const seconds = Math.round((Date.now() - updatedAt) / 1000);
            const said = isPaused ? bar.dataset.asyncqPaused : waitMs > EVERY_MS ? bar.dataset.asyncqFailed :
                bar.dataset.asyncqUpdated.replace("{seconds}", seconds);
            if (text.textContent !== said) text.textContent = said;
        }

        button.addEventListener("click", () => {
            isPaused = !isPaused;
            button.setAttribute("aria-pressed", String(isPaused));
            nextAt = Date.now();
            show();
        });
        function tick() {
            if (document.hidden) return;
            if (!isPaused && !isAsking && Date.now() >= nextAt) update();
            show();
        }

        bar.hidden = false;
        show();
    }

    const begin = () => document.querySelectorAll(".asyncq-live").forEach(start);
    if (document.readyState === "loading") {
        document.addEventListener("DOMContentLoaded", begin);
    } else {
        begin();
    }
}
