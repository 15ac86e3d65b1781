// One message on the page.

import { copyButton, element, growWithText, iconButton } from "./dom.js";
import { showMarkdown } from "./markdown.js";

/** A user's message. onEdit(text): what it is to be instead. */
export class Question {
  #onEdit;
  #body;
  #tools;

  constructor(message, onEdit) {
    this.message = message;
    this.#onEdit = onEdit;
    this.#body = element("div", { class: "body", text: message.content });
    this.#tools = element("div", { class: "tools" }, iconButton("edit", "Edit this message", () => this.edit()));
    this.node = element(
      "article",
      { class: "message user" },
      element("h2", { class: "unseen", text: "You" }),
      this.#body,
      this.#tools,
    );
  }

  edit() {
    if (this.node.querySelector("form")) return;
    const field = element("textarea", { "aria-label": "Your message", rows: "1" });
    field.value = this.message.content;
    const form = element(
      "form",
      { class: "editor" },
      field,
      element(
        "p",
        { class: "actions" },
        element("button", { type: "button", class: "plain", text: "Cancel", onclick: () => close() }),
        element("button", { type: "submit", class: "filled", text: "Send" }),
      ),
    );
    const close = () => {
      form.replaceWith(this.#body);
      this.#tools.hidden = false;
      this.#tools.firstElementChild.focus();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) this.#onEdit(field.value.trim());
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (isSend(event)) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.#body.replaceWith(form);
    this.#tools.hidden = true;
    growWithText(field);
    field.focus();
  }
}

/** Enter alone; while an input method composes a word, Enter is its own. */
export function isSend(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;
}

/** An answer, while it comes and after. onAgain: another one is wanted. */
export class Answer {
  #body = element("div", { class: "body markdown" });
  #thoughts = element("div", { class: "thoughts markdown" });
  #summary = element("summary", { text: "Thinking" });
  #reasoning = element("details", { class: "reasoning", hidden: true }, this.#summary, this.#thoughts);
  #error = element("p", { class: "error", role: "alert", hidden: true });
  #figures = element("p", { class: "stats", "aria-live": "off" });
  #frame = null;

  constructor(message, onAgain) {
    this.message = message;
    const tools = element(
      "div",
      { class: "tools" },
      copyButton(() => this.message.content, "Copy the answer"),
      iconButton("again", "Answer again", onAgain),
    );
    this.node = element(
      "article",
      { class: "message assistant" },
      element("h2", { class: "unseen", text: "Answer" }),
      this.#reasoning,
      this.#body,
      this.#error,
      element("div", { class: "below" }, this.#figures, tools),
    );
    this.show();
  }

  set isComing(value) {
    this.node.classList.toggle("coming", value);
  }

  /** With the next frame, so that a fast model does not draw more often than the screen. */
  showSoon(then) {
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = null;
      this.show();
      then();
    });
  }

  show() {
    if (this.#frame !== null) cancelAnimationFrame(this.#frame);
    this.#frame = null;
    const { content, reasoning, figures, error } = this.message;
    showMarkdown(this.#body, content);
    if (reasoning) {
      showMarkdown(this.#thoughts, reasoning);
      this.#reasoning.hidden = false;
      this.#summary.textContent = content ? "Thoughts" : "Thinking";
    }
    this.#error.hidden = !error;
    if (this.#error.textContent !== (error ?? "")) this.#error.textContent = error ?? "";
    this.#figures.replaceChildren(...figures.map(({ text, title }) => element("span", { title, text })));
  }
}
