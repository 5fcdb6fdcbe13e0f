"use strict";
// Keep numbers alive: each element with an id and `data-asyncq-live` is replaced by that of the same page, asked for
// again every five seconds. A page has it where it includes "live.html". Nothing happens while the tab is hidden, or
// while updates are paused. An element with the focus, an open <details> or a selection in it is left as it is.
{
    const EVERY_MS = 5000, LONGEST_MS = 60000;

    function isInUse(element) {
        const selection = window.getSelection();
        return element.contains(document.activeElement) || element.querySelector("details[open]") !== null ||
            (!selection.isCollapsed && element.contains(selection.anchorNode));
    }

    function replaceAll(text) {
        const page = new DOMParser().parseFromString(text, "text/html");
        document.querySelectorAll("[data-asyncq-live][id]").forEach((old) => {
            const fresh = page.getElementById(old.id);
            if (fresh !== null && !isInUse(old) && fresh.innerHTML !== old.innerHTML) {
                const [left, top] = [old.scrollLeft, old.scrollTop];
                old.replaceChildren(...fresh.childNodes);
                [old.scrollLeft, old.scrollTop] = [left, top];
            }
        });
    }

    function start(bar) {
        const text = bar.querySelector(".asyncq-live-text"), button = bar.querySelector("button");
        let updatedAt = Date.now(), waitMs = EVERY_MS, nextAt = updatedAt + waitMs, isPaused = false, isAsking = false;

        async function update() {
            isAsking = true;
            try {
                const answer = await fetch(window.location.href, {credentials: "same-origin", redirect: "error"});
                if (!answer.ok) throw new Error(answer.status);
                replaceAll(await answer.text());
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
        setInterval(() => {
            if (document.hidden) return;
            if (!isPaused && !isAsking && Date.now() >= nextAt) update();
            show();
        }, 1000);
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
