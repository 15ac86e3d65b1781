// The form of options: an empty field is not sent, so that the server's default holds. What is out of range, the server
// says.

import { byId } from "./dom.js";

const KEY = "noria.options";
const NUMBERS = [
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "max_completion_tokens",
  "seed",
  "presence_penalty",
  "frequency_penalty",
  "repetition_penalty",
];
const FIELDS = ["system", "stops", ...NUMBERS];

export class Options {
  constructor() {
    this.#restore();
    byId("options-form").addEventListener("input", () => this.#save());
    byId("reset").addEventListener("click", () => this.#reset());
  }

  get system() {
    return byId("system").value.trim();
  }

  /** Parameters of a request. Throws Error for what is no number. */
  get params() {
    const params = {};
    for (const name of NUMBERS) {
      const field = byId(name);
      if (field.validity.badInput) throw new Error(`${this.#labelOf(field)} is not a number.`);
      if (field.value !== "") params[name] = Number(field.value);
    }
    const stops = byId("stops").value.split("\n").filter((line) => line !== "");
    if (stops.length) params.stop = stops.map((line) => line.replaceAll("\\n", "\n"));
    return params;
  }

  #labelOf(field) {
    return field.labels[0].textContent;
  }

  #restore() {
    let values = {};
    try {
      values = JSON.parse(sessionStorage.getItem(KEY)) ?? {};
    } catch {
      return;
    }
    for (const name of FIELDS) byId(name).value = values[name] ?? "";
  }

  #save() {
    try {
      sessionStorage.setItem(KEY, JSON.stringify(Object.fromEntries(FIELDS.map((name) => [name, byId(name).value]))));
    } catch {
      // they then last as long as the page
    }
  }

  #reset() {
    for (const name of FIELDS) byId(name).value = "";
    this.#save();
  }
}
