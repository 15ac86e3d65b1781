// What the server says of itself, asked for gently, and only while somebody can see it.

import { getMetrics, getReadiness } from "./api.js";

const BUSY_MS = 1500;
const IDLE_MS = 5000;

export class Gauges {
  #show;
  #timer = null;
  #busy = false;
  #soon = false; // what the last answer left behind is on its way

  /** show({ready, status, metrics}): metrics are null while the server has none. */
  constructor(show) {
    this.#show = show;
    document.addEventListener("visibilitychange", () => this.#look());
    this.#look();
  }

  set busy(value) {
    this.#soon = this.#busy && !value;
    this.#busy = value;
    this.#look();
  }

  async #look() {
    clearTimeout(this.#timer);
    if (document.visibilityState !== "visible") return;
    const wait = this.#busy || this.#soon ? BUSY_MS : IDLE_MS;
    this.#soon = false;
    const timer = (this.#timer = setTimeout(() => this.#look(), wait));
    const readiness = await getReadiness();
    const metrics = await getMetrics().catch(() => null);
    if (timer === this.#timer) this.#show({ ...readiness, metrics }); // else a later look will say
  }
}
