// The server's API. Every failure is a Problem with the API's own message.

const STORED = "ttmem-key";

export class Problem extends Error {
  constructor(message, status = 0, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }

  static of(status, body) {
    const error = body?.error;
    return new Problem(error?.message ?? `the server answered ${status}`, status, error?.code ?? "");
  }
}

export const key = {
  get: () => sessionStorage.getItem(STORED) ?? "",
  set: (value) => (value ? sessionStorage.setItem(STORED, value) : sessionStorage.removeItem(STORED)),
};

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let answer;
  try {
    answer = await fetch(`v1/${path}`, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("the server cannot be reached: is it still running?");
  }
  if (!answer.ok) throw Problem.of(answer.status, await answer.json().catch(() => null));
  return answer;
}

const read = async (path, options) => (await request(path, options)).json();
const post = (path, body, signal) =>
  request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
const memory = (id, part = "") => `memories/${encodeURIComponent(id)}${part}`;

export const modelName = async () => (await read("models")).data[0].id;
export const getMemory = (id) => read(memory(id));
export const getBudget = (id) => read(memory(id, "/budget"));
export const cancelJob = (id) => read(memory(id, "/cancel"), { method: "POST" });
export const deleteMemory = (id) => read(memory(id), { method: "DELETE" });
export const createFromText = async (body) => (await post("memories", body)).json();
export const createFromFile = (form) => read("memories", { method: "POST", body: form });
export const importFile = (form) => read("memories/import", { method: "POST", body: form });
export const fileAddress = (id) => `v1/${memory(id, "/file")}`;
export const readFile = async (id) => (await request(memory(id, "/file"))).blob();

export async function listMemories() {
  const all = [];
  for (;;) {
    const after = all.length ? `&after=${all.at(-1).id}` : "";
    const page = await read(`memories?limit=1000${after}`);
    all.push(...page.data);
    if (!page.has_more) return all;
  }
}

// Server-sent events as objects. An event with an error ends them.
async function* messages(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (held + value).split("\n\n");
      held = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue;
        if (part === "data: [DONE]") return;
        const body = JSON.parse(part.slice(6));
        if (body.error && body.object !== "memory") throw Problem.of(0, body); // a failed job has an error of its own
        yield body;
      }
    }
  } catch (error) {
    if (error instanceof Problem || error.name === "AbortError") throw error;
    throw new Problem("the connection to the server was lost");
  } finally {
    reader.cancel().catch(() => {});
  }
}

export const jobEvents = async function* (id, signal) {
  yield* messages(await request(memory(id, "/events"), { signal }));
};

export const answerEvents = async function* (kind, body, signal) {
  const whole = { ...body, stream: true, stream_options: { include_usage: true } };
  yield* messages(await post(kind === "chat" ? "chat/completions" : "completions", whole, signal));
};
