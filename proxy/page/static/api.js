// Asking the server: with the key, if there is one, and its errors as exceptions. Server-sent events are read by fetch,
// since EventSource sends no headers.

const STORED = "epd-serve-key";
const SILENT_MS = 10000;
const AGAIN_MS = 2000;

export class Refusal extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answers ${status}`);
    this.status = status;
    this.details = error ?? {};
  }
}

export const key = {
  get: () => sessionStorage.getItem(STORED) ?? "",
  set: (value) => (value ? sessionStorage.setItem(STORED, value) : sessionStorage.removeItem(STORED)),
};

/** The response to a request that the server has accepted; throws Refusal. `body`: sent as JSON. */
export async function ask(path, { body, headers = {}, signal } = {}) {
  const asked = { headers: { ...headers }, signal, credentials: "omit", cache: "no-store" };
  if (key.get()) asked.headers.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) {
    asked.method = "POST";
    asked.body = JSON.stringify(body);
    asked.headers["content-type"] = "application/json";
  }
  const response = await fetch(path, asked);
  if (!response.ok) {
    const told = await response.json().catch(() => ({}));
    throw new Refusal(response.status, told.error);
  }
  return response;
}

export const json = async (path, options) => (await ask(path, options)).json();

/** Server-sent events of a response, as { event, data }; `data` as it came. Aborts through the response's own signal. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const lines = text.slice(0, end).split("\n");
      text = text.slice(end + 2);
      const of = (name) => lines.filter((line) => line.startsWith(`${name}: `)).map((line) => line.slice(name.length + 2));
      yield { event: of("event")[0] ?? "message", data: of("data").join("\n") };
    }
  }
}

/**
 * What the server tells of the deployment, for ever: `take(name, value)` for each event. `lost(why)` when it cannot be
 * had, before it is tried again. Returns when the key is refused.
 */
export async function follow(path, take, lost) {
  for (;;) {
    const silence = new AbortController();
    let timer = setTimeout(() => silence.abort(), SILENT_MS);
    try {
      for await (const { event, data } of events(await ask(path, { signal: silence.signal }))) {
        clearTimeout(timer);
        timer = setTimeout(() => silence.abort(), SILENT_MS);
        take(event, JSON.parse(data));
      }
      lost("the connection has ended");
    } catch (error) {
      if (error.status === 401) return;
      lost(error instanceof Refusal ? error.message : "the server does not answer");
    } finally {
      clearTimeout(timer);
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}
