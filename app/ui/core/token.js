/** Asks for the access token, which is kept in this tab only (sessionStorage). */

import { byId } from "./dom.js";

let asked = null;

/** The token that the user enters, or null; simultaneous callers get the same token. */
export function askForToken(wasWrong) {
  asked ??= open(wasWrong).finally(() => {
    asked = null;
  });
  return asked;
}

function open(wasWrong) {
  const [dialog, input, error] = ["token-dialog", "token", "token-error"].map(byId);
  error.textContent = wasWrong ? "The server does not accept this token." : "";
  input.setAttribute("aria-invalid", wasWrong);
  input.value = "";
  return new Promise((resolve) => {
    byId("token-form").onsubmit = (event) => {
      event.preventDefault();
      if (input.value.trim()) dialog.close(input.value.trim());
    };
    byId("token-cancel").onclick = () => dialog.close("");
    dialog.onclose = () => resolve(dialog.returnValue || null);
    dialog.returnValue = "";
    dialog.showModal();
  });
}
