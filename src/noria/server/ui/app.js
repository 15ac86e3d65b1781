// The page: what a person does, and what it sets going.

import { ApiError, getModels, streamChat } from "./api.js";
import { Conversation } from "./conversation.js";
import { askForKey, OptionsPanel } from "./dialogs.js";
import { byId, growWithText } from "./dom.js";
import { Gauges } from "./gauges.js";
import { Answer, isSend, Question } from "./message.js";
import { Meter } from "./meter.js";
import { Options } from "./options.js";
import { isDark, toggleTheme, watchTheme } from "./theme.js";

const NEAR_END_PX = 60;
const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 0 });
const whole = new Intl.NumberFormat("en");

class Chat {
  #conversation = new Conversation();
  #options = new Options();
  #gauges = new Gauges((report) => this.#showReport(report));
  #views = [];
  #model = null;
  #running = null; // the AbortController of the answer that is coming
  #follows = true; // the end of the conversation is kept in view
  #prompt = byId("prompt");
  #scroll = byId("scroll");
  #messages = byId("messages");

  constructor() {
    for (const message of this.#conversation.messages) this.#view(message);
    this.#listen();
    this.#arrange();
    this.#toEnd();
    this.#loadModel();
    this.#focus();
  }

  // ---------------------------------------------------------------------------------------------- talking

  async #send(text) {
    if (this.#running || !text.trim()) return;
    this.#prompt.value = "";
    this.#prompt.dispatchEvent(new Event("input"));
    this.#view(this.#conversation.add("user", text.trim()));
    await this.#answer();
  }

  #again() {
    if (this.#running) return;
    const question = this.#conversation.lastOf("user");
    if (!question) return;
    this.#cut(this.#conversation.messages[this.#conversation.messages.indexOf(question) + 1]);
    this.#focus(); // the button that was pressed is gone
    this.#answer();
  }

  #edit(message, text) {
    if (this.#running) return;
    this.#cut(message);
    this.#focus();
    this.#view(this.#conversation.add("user", text));
    this.#answer();
  }

  #stop() {
    this.#running?.abort();
  }

  #startOver() {
    this.#stop();
    this.#running = null;
    this.#conversation.clear();
    this.#views = [];
    this.#messages.replaceChildren();
    this.#arrange();
    this.#focus();
  }

  /** Streams an answer to the conversation as it stands. */
  async #answer() {
    const controller = (this.#running = new AbortController());
    const messages = this.#conversation.forRequest(this.#options.system);
    const message = this.#conversation.add("assistant", "");
    const view = this.#view(message);
    const meter = new Meter();
    message.figures = meter.figures;
    view.isComing = true;
    this.#arrange();
    this.#toEnd();
    let failure = null;
    try {
      const body = { model: this.#model?.id, messages, return_token_ids: true, ...this.#options.params };
      for await (const chunk of streamChat(body, controller.signal)) {
        this.#take(chunk, message, meter);
        view.showSoon(() => this.#followEnd());
      }
    } catch (error) {
      if (controller.signal.aborted) meter.setEnding("stopped");
      else failure = error;
    }
    message.error = failure?.message ?? null;
    message.figures = failure && !message.content ? [] : meter.figures;
    view.isComing = false;
    view.show();
    if (this.#running !== controller) return; // the chat was begun anew
    this.#running = null;
    this.#conversation.save();
    this.#arrange();
    this.#followEnd();
    if (failure instanceof ApiError && failure.status === 401 && (await askForKey(failure.message))) {
      await this.#loadModel();
      this.#again();
    }
  }

  #take(chunk, message, meter) {
    if (chunk.usage) meter.setUsage(chunk.usage);
    for (const choice of chunk.choices) {
      message.content += choice.delta.content ?? "";
      message.reasoning += choice.delta.reasoning_content ?? choice.delta.reasoning ?? "";
      meter.add(choice.token_ids?.length ?? 1);
      if (choice.finish_reason === "length") meter.setEnding("length limit");
    }
    message.figures = meter.figures;
  }

  // ---------------------------------------------------------------------------------------------- showing

  #view(message) {
    const view =
      message.role === "user"
        ? new Question(message, (text) => this.#edit(message, text))
        : new Answer(message, () => this.#again());
    this.#views.push(view);
    this.#messages.append(view.node);
    return view;
  }

  /** Drops `message` and what follows. */
  #cut(message) {
    const index = this.#views.findIndex((view) => view.message === message);
    if (index < 0) return;
    for (const view of this.#views.splice(index)) view.node.remove();
    this.#conversation.cutAt(message);
  }

  /** What is shown and what can be done, as things stand. */
  #arrange() {
    const isRunning = this.#running !== null;
    const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
    byId("welcome").hidden = this.#views.length > 0;
    byId("send").hidden = isRunning;
    byId("stop").hidden = !isRunning;
    byId("send").disabled = !this.#prompt.value.trim();
    if (hadFocus) this.#focus();
    byId("wheel").classList.toggle("turning", isRunning);
    this.#messages.setAttribute("aria-busy", String(isRunning)); // an answer is read out when it is whole
    this.#messages.classList.toggle("running", isRunning);
    for (const role of ["user", "assistant"]) {
      const last = this.#views.findLast((view) => view.message.role === role);
      for (const view of this.#views) {
        if (view.message.role === role) view.node.classList.toggle("last", view === last);
      }
    }
    this.#gauges.busy = isRunning;
  }

  #showReport({ ready, status, metrics }) {
    const readiness = byId("readiness");
    const text = ready ? "ready" : status;
    if (readiness.textContent !== text) readiness.textContent = text;
    if (ready && readiness.dataset.ready === "false") this.#loadModel();
    readiness.dataset.ready = String(ready);
    byId("figures").hidden = !metrics?.has("num_requests_running");
    if (!metrics) return;
    byId("running").textContent = whole.format(metrics.get("num_requests_running") ?? 0);
    byId("waiting").textContent = whole.format(metrics.get("num_requests_waiting") ?? 0);
    byId("cache").textContent = percent.format(metrics.get("kv_cache_usage_perc") ?? 0);
    byId("hits").textContent = percent.format(metrics.get("prefix_cache_hit_rate") ?? 0);
  }

  async #loadModel() {
    try {
      [this.#model] = await getModels();
    } catch (error) {
      if (error.status === 401 && (await askForKey(error.message))) await this.#loadModel();
      return;
    }
    byId("model").textContent = this.#model.id;
    document.title = `${this.#model.id} · noria`;
    const limit = this.#model.max_model_len;
    byId("model").title = limit ? `Conversations of up to ${whole.format(limit)} tokens` : "";
  }

  /** Where one goes on. Not into the field where that would bring up a keyboard over half of the screen. */
  #focus() {
    (matchMedia("(pointer: coarse)").matches ? this.#scroll : this.#prompt).focus();
  }

  #toEnd() {
    this.#follows = true;
    this.#scroll.scrollTop = this.#scroll.scrollHeight;
    byId("latest").hidden = true;
  }

  #followEnd() {
    if (this.#follows) this.#toEnd();
    else byId("latest").hidden = false;
  }

  // --------------------------------------------------------------------------------------------- listening

  #listen() {
    growWithText(this.#prompt);
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send(this.#prompt.value);
    });
    this.#prompt.addEventListener("input", () => {
      byId("send").disabled = !this.#prompt.value.trim();
    });
    this.#prompt.addEventListener("keydown", (event) => {
      if (isSend(event)) {
        event.preventDefault();
        this.#send(this.#prompt.value);
      } else if (event.key === "ArrowUp" && !this.#prompt.value && !this.#running) {
        event.preventDefault();
        this.#views.findLast((view) => view.message.role === "user")?.edit();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#stop();
    });
    this.#scroll.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.#scroll;
      this.#follows = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
      if (this.#follows) byId("latest").hidden = true;
    });
    byId("suggestions").addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) this.#send(button.textContent);
    });
    byId("stop").addEventListener("click", () => this.#stop());
    byId("new").addEventListener("click", () => this.#startOver());
    byId("latest").addEventListener("click", () => this.#toEnd());
    byId("change-key").addEventListener("click", async () => {
      if (await askForKey("For a server that wants one.")) this.#loadModel();
    });
  }
}

const theme = byId("theme");
const showTheme = () => theme.setAttribute("aria-pressed", String(isDark()));
theme.addEventListener("click", () => {
  toggleTheme();
  showTheme();
});
watchTheme(showTheme);
new OptionsPanel();
new Chat();
