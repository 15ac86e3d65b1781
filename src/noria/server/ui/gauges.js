// What the server says of itself, asked for gently, and only while somebody can see it.

import { getMetrics, getReadiness } from "./api.js";

const BUSY_MS = 1500;
const IDLE_MS = 5000;

export class Gauges {
  #show;
  #timer = null;
  #busy = false;

  /** show({ready, status, metrics}): metrics are null while the server has none. */
  constructor(show) {
    this.#show = show;
    document.addEventListener("visibilitychange", () => this.#look());
    this.#look();
  }

  set busy(value) {
    this.#busy = value;
    this.#look();
  }

  async #look() {
    clearTimeout(this.#timer);
    if (document.visibilityState !== "visible") return;
    const timer = (this.#timer = setTimeout(() => this.#look(), this.#busy ? BUSY_MS : IDLE_MS));
    const readiness = await getReadiness();
    const metrics = await getMetrics().catch(() => null);
    if (timer === this.#timer) this.#show({ ...readiness, metrics }); // else a later look will say
  }
}
