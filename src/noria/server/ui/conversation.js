// The messages of a chat. They are kept for this tab alone: a reload finds them, and they are gone when it is closed.

const KEY = "noria.conversation";

/** Message: {role, content, reasoning, figures, error}; figures: of its Meter, error: what the server said. */
export class Conversation {
  messages = [];

  constructor() {
    try {
      this.messages = JSON.parse(sessionStorage.getItem(KEY)) ?? [];
    } catch {
      this.messages = []; // nothing is kept, or nothing that can be read
    }
  }

  add(role, content) {
    const message = { role, content, reasoning: "", figures: [], error: null };
    this.messages.push(message);
    return message;
  }

  get last() {
    return this.messages.at(-1);
  }

  /** The last message of `role`. */
  lastOf(role) {
    return this.messages.findLast((message) => message.role === role);
  }

  /** Drops `message` and what follows. */
  cutAt(message) {
    const index = this.messages.indexOf(message);
    if (index >= 0) this.messages.length = index;
  }

  clear() {
    this.messages = [];
    this.save();
  }

  save() {
    try {
      sessionStorage.setItem(KEY, JSON.stringify(this.messages));
    } catch {
      // it then lasts as long as the page
    }
  }

  /** As the API takes them. Reasoning is not sent back; an answer that never came stays as an empty one, because many
   * templates want the roles to take turns. */
  forRequest(system) {
    const messages = this.messages.map(({ role, content }) => ({ role, content }));
    return system ? [{ role: "system", content: system }, ...messages] : messages;
  }
}
