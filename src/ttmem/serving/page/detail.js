// The memory that is open: what it is, and what can be done with it.

import { fileAddress, getBudget, key, readFile } from "./api.js";
import { find, make, pairs, showProblem } from "./dom.js";
import { bytes, count, date, figure, percent, title } from "./format.js";
import { heatmap } from "./heatmap.js";
import { WORDS } from "./list.js";
import { unfinished } from "./watch.js";

export class Detail {
  constructor() {
    this.id = null;
    this.mapped = null;
    find("download").addEventListener("click", (event) => this.download(event));
  }

  // Show a memory's state. The budget's map is asked for once it is ready.
  update(memory) {
    this.id = memory.id;
    find("detail").hidden = false;
    find("detail-title").textContent = title(memory);
    const status = find("detail-status");
    status.textContent = memory.error ? `${WORDS[memory.status]}: ${memory.error.message}` : WORDS[memory.status];
    status.className = memory.status === "failed" ? "problem" : "muted";
    find("facts").replaceChildren(...pairs(facts(memory)));
    const ready = memory.status === "ready";
    find("cancel").hidden = !unfinished(memory);
    find("download").hidden = !ready;
    find("download").href = fileAddress(memory.id);
    find("download").setAttribute("download", `${title(memory)}.ttmem`);
    find("ask-panel").hidden = !ready;
    if (ready) this.map(memory.id);
    else this.unmap();
  }

  close() {
    this.id = null;
    this.unmap();
    find("detail").hidden = true;
  }

  unmap() {
    this.mapped = null;
    find("budget-panel").hidden = true;
  }

  async map(id) {
    if (this.mapped === id) return;
    this.mapped = id;
    find("budget-panel").hidden = false;
    find("budget").replaceChildren(make("p", { class: "muted" }, "Reading…"));
    let content;
    try {
      content = heatmap(await getBudget(id));
    } catch (error) {
      content = [make("p", { class: "problem" }, error.message)];
    }
    if (this.mapped === id) find("budget").replaceChildren(...content);
  }

  // A link cannot carry a key: with one, the file is fetched first.
  async download(event) {
    if (!key.get()) return;
    event.preventDefault();
    try {
      const address = URL.createObjectURL(await readFile(this.id));
      make("a", { href: address, download: find("download").getAttribute("download") }).click();
      setTimeout(() => URL.revokeObjectURL(address), 60_000);
    } catch (error) {
      showProblem(error);
    }
  }
}

function facts(memory) {
  const found = [["Made", date(memory.created_at)]];
  const details = memory.details;
  if (!details) return found;
  found.push(["Document", `${count(details.document.tokens)} tokens`]);
  found.push(["Memory", bytes(details.loaded_bytes)]);
  if (details.full_bytes) found.push(["Full context", bytes(details.full_bytes)]);
  if (details.budget.ratio) found.push(["Times smaller", figure(details.budget.ratio)]);
  found.push(["Method", details.method]);
  if (details.fidelity) {
    found.push(["Same next token", percent(details.fidelity.top1)]);
    found.push(["KL to full", `${figure(details.fidelity.kl)} nats`]);
  }
  return found;
}
