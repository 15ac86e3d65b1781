// How fast an answer comes, measured here: what a person sees, network included.

const whole = new Intl.NumberFormat("en");

/** Three digits at most: 0.12, 1.5, 97.3, 120 */
function short(value) {
  return value >= 100 ? whole.format(Math.round(value)) : value.toFixed(value >= 10 ? 1 : 2);
}

export class Meter {
  #begin = performance.now();
  #first = null;
  #last = null;
  #tokensAtFirst = 0;
  #tokens = 0;
  #usage = null;
  #ending = null;

  /** count: tokens of a part of the answer that has just come. */
  add(count) {
    if (!count) return;
    this.#last = performance.now();
    if (this.#first === null) {
      this.#first = this.#last;
      this.#tokensAtFirst = count;
    }
    this.#tokens += count;
  }

  /** usage: the server's own count. */
  setUsage(usage) {
    this.#usage = usage;
  }

  /** ending: "stopped", "length", ...; nothing when the model came to its end. */
  setEnding(ending) {
    this.#ending = ending;
  }

  /** Tokens per second after the first part of the answer; null before there are any. */
  get rate() {
    const seconds = (this.#last - this.#first) / 1000;
    return seconds > 0 ? (this.#tokens - this.#tokensAtFirst) / seconds : null;
  }

  /** [{text, title}], to be shown in a row. */
  get figures() {
    if (this.#first === null) return [{ text: this.#ending ?? "waiting for the first token" }];
    const count = this.#usage?.completion_tokens ?? this.#tokens;
    const shown = [];
    if (this.rate !== null) shown.push({ text: `${short(this.rate)} tokens/s`, title: "Speed after the first token" });
    shown.push({ text: `first after ${short((this.#first - this.#begin) / 1000)} s`, title: "Time to the first token" });
    shown.push({ text: `${whole.format(count)} ${count === 1 ? "token" : "tokens"}`, title: "Length of the answer" });
    if (this.#usage) {
      const cached = this.#usage.prompt_tokens_details?.cached_tokens ?? 0;
      const prompt = whole.format(this.#usage.prompt_tokens);
      shown.push({
        text: `prompt ${prompt}, ${whole.format(cached)} cached`,
        title: "Tokens of the whole conversation up to here, and how many of them the prefix cache had",
      });
    }
    if (this.#ending) shown.push({ text: this.#ending });
    return shown;
  }
}
