// A question before something that cannot be undone.

import { find } from "./dom.js";

// True where it is confirmed; Escape is a no. Focus goes back to where it was.
export function confirmed(text) {
  const dialog = find("confirm");
  find("confirm-text").textContent = text;
  dialog.returnValue = "no";
  dialog.showModal();
  find("confirm-no").focus();
  return new Promise((resolve) => {
    find("confirm-no").onclick = () => dialog.close("no");
    find("confirm-yes").onclick = () => dialog.close("yes");
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
