// One question, to the memory and to the full context, with what each cost.

import { answerEvents } from "./api.js";
import { find, make, pairs, say } from "./dom.js";
import { bytes, count, duration, figure } from "./format.js";

const NOT_KEPT = "The document was not kept in this memory, so there is no full context to compare with. " +
  "Compact it again with the document kept.";

export class Ask {
  constructor(model) {
    this.model = model;
    this.memory = null;
    this.running = null;
    find("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    find("stop").addEventListener("click", () => this.running?.abort());
  }

  show(memory) {
    if (this.memory?.id === memory.id) return;
    this.running?.abort();
    this.memory = memory;
    find("answers").replaceChildren();
    const kept = memory.details.document_kept;
    find("compare").disabled = !kept;
    find("compare").checked = kept;
  }

  async ask() {
    const question = find("question").value.trim();
    if (!question) {
      find("question").focus();
      return;
    }
    this.running?.abort();
    const running = (this.running = new AbortController());
    const { details } = this.memory;
    const small = new Answer("memory", "Memory", details.loaded_bytes);
    const full = new Answer("full", "Full context", details.full_bytes);
    find("answers").replaceChildren(small.article, full.article);
    find("stop").hidden = false;
    find("ask-button").disabled = true;
    try {
      await small.run(this.request(question), running.signal);
      if (!details.document_kept) full.say(NOT_KEPT);
      else if (!find("compare").checked) full.say("Not asked.");
      else await full.run(this.request(question, "full"), running.signal);
    } finally {
      if (this.running === running) {
        find("stop").hidden = true;
        find("ask-button").disabled = false;
        this.running = null;
      }
    }
  }

  request(question, context = "memory") {
    const format = find("format").value;
    const body = { model: this.model, memory: this.memory.id, context, max_tokens: Number(find("length").value) || 128 };
    return format === "chat"
      ? [format, { ...body, messages: [{ role: "user", content: question }] }]
      : [format, { ...body, prompt: `\n\nQuestion: ${question}\nAnswer:`, stop: "\n" }];
  }
}

class Answer {
  constructor(kind, name, held) {
    this.name = name;
    this.held = held;
    this.text = make("p", { class: "answer" });
    this.figures = make("dl", { class: "facts" });
    this.article = make("article", { class: "panel-inner", id: `answer-${kind}` }, make("h4", {}, name), this.text, this.figures);
    this.cost({});
  }

  say(text) {
    this.text.textContent = text;
    this.text.classList.add("muted");
  }

  async run([format, body], signal) {
    const start = performance.now();
    let [first, last, usage] = [null, start, null];
    this.article.setAttribute("aria-busy", "true");
    try {
      for await (const event of answerEvents(format, body, signal)) {
        usage = event.usage ?? usage;
        const choice = event.choices[0];
        const piece = choice?.delta?.content ?? choice?.text ?? "";
        if (!piece && !choice?.finish_reason) continue;
        last = performance.now();
        first ??= last;
        this.text.append(format === "plain" && !this.text.textContent ? piece.trimStart() : piece);
      }
      if (!this.text.textContent) this.say("(nothing)");
      this.cost({ wait: first - start, writing: last - first, usage });
      say(`${this.name}: ${this.text.textContent}`);
    } catch (error) {
      if (error.name === "AbortError") this.text.append(" (stopped)");
      else this.fail(error);
    } finally {
      this.article.removeAttribute("aria-busy");
    }
  }

  fail(error) {
    this.text.textContent = error.message;
    this.text.classList.add("problem");
    this.text.setAttribute("role", "alert");
  }

  cost({ wait, writing, usage }) {
    const steps = usage ? usage.completion_tokens - 1 : 0;
    this.figures.replaceChildren(...pairs([
      ["KV of the document", bytes(this.held), "bytes"],
      ["First token after", wait === undefined ? "–" : duration(wait / 1000), "wait"],
      ["Tokens per second", steps > 0 && writing > 0 ? figure((1000 * steps) / writing) : "–", "speed"],
      ["Tokens read", usage ? count(usage.prompt_tokens) : "–", "read"],
    ]));
  }
}
