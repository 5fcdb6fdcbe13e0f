"use strict";
// Show the Copy buttons, which are hidden without JavaScript, and copy the text above each on click.
{
    function copyBySelection(source) {
        // navigator.clipboard is missing where the admin is served without TLS.
        const selection = window.getSelection();
        selection.removeAllRanges();
        const range = document.createRange();
        range.selectNodeContents(source);
        selection.addRange(range);
        const copied = document.execCommand("copy");
        selection.removeAllRanges();
        return copied;
    }

    async function copy(source) {
        try {
            await navigator.clipboard.writeText(source.textContent);
            return true;
        } catch {
            return copyBySelection(source);
        }
    }

    function equip(button) {
        if (!button.hidden) return;
        const box = button.closest(".asyncq-text");
        button.hidden = false;
        button.addEventListener("click", async () => {
            const copied = await copy(box.querySelector("pre"));
            box.querySelector(".asyncq-copy-result").textContent =
                copied ? button.dataset.asyncqCopied : button.dataset.asyncqFailed;
        });
    }

    function equipAll() {
        document.querySelectorAll(".asyncq-copy").forEach(equip);
    }

    document.addEventListener("asyncq-renewed", equipAll);
    if (document.readyState === "loading") {
        document.addEventListener("DOMContentLoaded", equipAll);
    } else {
        equipAll();
    }
}
