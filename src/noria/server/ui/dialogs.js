// The panel of options, beside the chat where there is room and over it where there is not; and the question for a key.

import { getKey, setKey } from "./api.js";
import { byId } from "./dom.js";

const roomy = matchMedia("(min-width: 60rem)");

export class OptionsPanel {
  #dialog = byId("options");
  #button = byId("open-options");

  constructor() {
    this.#button.addEventListener("click", () => (this.#dialog.open ? this.#dialog.close() : this.#open()));
    byId("close-options").addEventListener("click", () => this.#dialog.close());
    this.#dialog.addEventListener("close", () => this.#closed());
    this.#dialog.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && roomy.matches) {
        event.stopPropagation();
        this.#dialog.close();
        this.#button.focus();
      }
    });
    roomy.addEventListener("change", () => {
      if (!this.#dialog.open) return;
      this.#dialog.close();
      this.#open();
    });
  }

  #open() {
    if (roomy.matches) this.#dialog.show();
    else this.#dialog.showModal();
    this.#button.setAttribute("aria-expanded", "true");
  }

  #closed() {
    this.#button.setAttribute("aria-expanded", String(this.#dialog.open));
  }
}

/** Asks for the API key. Returns whether one was given. */
export function askForKey(reason) {
  const dialog = byId("key-dialog");
  if (dialog.open) return Promise.resolve(false);
  byId("key-reason").textContent = reason;
  byId("key").value = getKey();
  return new Promise((resolve) => {
    const listeners = new AbortController();
    const { signal } = listeners;
    const end = (given) => {
      listeners.abort();
      dialog.close();
      resolve(given);
    };
    const submit = (event) => {
      event.preventDefault();
      setKey(byId("key").value.trim());
      end(true);
    };
    byId("key-form").addEventListener("submit", submit, { signal });
    byId("key-cancel").addEventListener("click", () => end(false), { signal });
    dialog.addEventListener("cancel", () => end(false), { signal });
    dialog.showModal();
    byId("key").select();
  });
}
