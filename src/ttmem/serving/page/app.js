// The page: which memory is open, what is followed, what follows from what.

import { cancelJob, deleteMemory, getMemory, key, listMemories, modelName } from "./api.js";
import { Ask } from "./ask.js";
import { confirmed } from "./confirm.js";
import { Detail } from "./detail.js";
import { clearProblem, find, say, showProblem } from "./dom.js";
import { title } from "./format.js";
import { MemoryList, WORDS } from "./list.js";
import { setUpUpload } from "./upload.js";
import { follow, unfinished, Watch } from "./watch.js";

const EVERY = 3000; // milliseconds between two looks at the list while a job is under way

class App {
  constructor() {
    this.memories = [];
    this.open = null;
    this.shown = null;
    this.following = null;
    this.list = new MemoryList((id) => this.select(id));
    this.detail = new Detail();
    this.watch = new Watch();
    this.ask = new Ask("");
  }

  async start() {
    setUpUpload((memory) => this.created(memory));
    find("cancel").addEventListener("click", () => this.attempt(() => this.cancel()));
    find("delete").addEventListener("click", () => this.attempt(() => this.remove()));
    find("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      key.set(find("key").value.trim());
      find("key").value = "";
      this.attempt(() => this.load());
    });
    window.addEventListener("hashchange", () => {
      const id = location.hash.slice(1);
      if (!id || id.startsWith("mem-")) this.attempt(() => this.show(id)); // other places are within the page
    });
    setInterval(() => {
      if (!document.hidden && this.memories.some(unfinished)) this.look().catch(() => {});
    }, EVERY);
    await this.attempt(() => this.load());
  }

  // Do something; what goes wrong is shown in the API's words.
  async attempt(action) {
    try {
      clearProblem();
      await action();
    } catch (error) {
      showProblem(error);
      if (error.status === 401) {
        find("key-panel").open = true;
        find("key").focus();
      }
    }
  }

  async load() {
    this.ask.model = await modelName();
    find("model").textContent = this.ask.model;
    find("key-panel").open = false;
    await this.refresh();
    await this.show(location.hash.slice(1));
  }

  async refresh() {
    this.memories = await listMemories();
    this.list.update(this.memories, this.open);
  }

  // The list, and the open job where its connection was lost: the server may be back.
  async look() {
    await this.refresh();
    if (this.open && !this.following && this.shown && unfinished(this.shown)) {
      clearProblem();
      await this.followTo(this.open);
    }
  }

  // Open a memory: its address goes into the page's, so that reloading and going back work.
  select(id) {
    if (location.hash.slice(1) === id) this.attempt(() => this.show(id));
    else location.hash = id;
    find("detail-title").focus({ preventScroll: false });
  }

  async show(id) {
    this.following?.abort();
    this.following = null;
    const known = this.memories.some((memory) => memory.id === id);
    this.open = known ? id : null;
    this.list.update(this.memories, this.open);
    if (!known) {
      this.shown = null;
      this.detail.close();
      return;
    }
    const memory = await getMemory(id);
    if (this.open !== id) return;
    this.update(memory);
    this.watch.show(memory);
    find("detail-title").focus();
    if (unfinished(memory)) await this.followTo(id);
  }

  // A job to its end, then the finished memory.
  async followTo(id) {
    const following = (this.following = new AbortController());
    try {
      await follow(id, following.signal, (memory) => {
        if (this.open !== id) return;
        this.update(memory);
        this.watch.update(memory);
        if (!unfinished(memory)) say(`${title(memory)} is ${WORDS[memory.status]}.`);
      });
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    } finally {
      if (this.following === following) this.following = null;
    }
  }

  // A memory's newest state, wherever it is shown.
  update(memory) {
    this.memories = this.memories.map((each) => (each.id === memory.id ? memory : each));
    this.list.update(this.memories, this.open);
    this.shown = memory;
    this.detail.update(memory);
    if (memory.status === "ready") this.ask.show(memory);
  }

  async created(memory) {
    this.memories.push(memory);
    this.list.update(this.memories, this.open);
    this.select(memory.id);
  }

  async cancel() {
    await cancelJob(this.open);
  }

  async remove() {
    const memory = this.memories.find((each) => each.id === this.open);
    if (!(await confirmed(`${title(memory)} and its file are removed from the server. This cannot be undone.`))) return;
    this.following?.abort();
    await deleteMemory(memory.id);
    this.memories = this.memories.filter((each) => each.id !== memory.id);
    history.replaceState(null, "", location.pathname);
    await this.show("");
    say(`${title(memory)} is deleted.`);
    find("memories").focus();
  }
}

new App().start();
