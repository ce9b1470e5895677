// The data of the run, over relative addresses, so that a path prefix or a tunnel works.

const TIMEOUT_MS = 15_000, REQUEST_TIMEOUT_MS = 120_000;
let token = ""; // of the run, in the memory of this tab alone; sent only where it is needed
let samplesNeedIt = false;

export function setToken(text) {
  token = text.trim();
}

/** A request without an answer, or one that was refused: the HTTP status (0 without an answer), and the reason. */
export class Refused extends Error {
  constructor(status, said) {
    super(said || `the answer is ${status}`);
    this.status = status;
    this.said = said;
  }
}

/** Fetch JSON; null if this server does not have it. */
export async function get(name) {
  const answer = await fetch(name, {
    cache: "no-store",
    headers: token && samplesNeedIt && name.startsWith("data/samples") ? { Authorization: `Bearer ${token}` } : {},
    signal: AbortSignal.timeout(TIMEOUT_MS),
  }).catch(() => Response.error());
  if (answer.status === 404) return null;
  if (answer.ok) return answer.json();
  samplesNeedIt ||= answer.status === 401;
  throw new Refused(answer.status, await answer.json().then((body) => body.said, () => ""));
}

/** Send the token, and a request as JSON; return what the run says to it. Without a request, only ask about the token. */
export async function send(name, request = null) {
  const answer = await fetch(name, {
    method: request ? "POST" : "GET",
    cache: "no-store",
    redirect: "error",
    headers: { Authorization: `Bearer ${token}`, ...(request && { "Content-Type": "application/json" }) },
    ...(request && { body: JSON.stringify(request) }),
    signal: AbortSignal.timeout(REQUEST_TIMEOUT_MS),
  }).catch(() => Response.error());
  const said = await answer.json().then((body) => body.said, () => "");
  if (answer.ok) return said;
  throw new Refused(answer.status, said);
}

/** Rows that are read as they are written: `more` fetches those since its last call, `take` returns them once. */
export class Rows {
  constructor(name) {
    this.name = name;
    this.from = 0;
    this.pending = [];
  }

  async more() {
    const answer = await get(`${this.name}?from=${this.from}`);
    if (answer === null) return;
    if (answer.next < this.from) location.reload(); // the file was cut by a resume
    this.from = answer.next;
    this.pending.push(...answer.rows);
  }

  take() {
    return this.pending.splice(0);
  }
}
