/**
 * Asks the server; a refusal becomes an error with the server's own sentence.
 */

export class ApiError extends Error {
  /** @param {string} message @param {number} status 0 if the server could not be reached */
  constructor(message, status) {
    super(message);
    this.status = status;
  }

  /** Whether asking again later may help. */
  get passing() {
    return this.status === 0 || this.status >= 500 || this.status === 429;
  }
}

/**
 * @param {string} path
 * @param {Record<string, string | number | null | undefined>} [query]
 * @returns {Promise<any>}
 */
export async function ask(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = new URLSearchParams(given.map(([name, value]) => [name, String(value)]));
  let response;
  try {
    response = await fetch(`/api/${path}${given.length ? `?${search}` : ""}`, { headers: { Accept: "application/json" } });
  } catch {
    throw new ApiError("simic watch cannot be reached: is it still running?", 0);
  }
  if (response.ok) return response.json();
  const said = await response.json().catch(() => null);
  throw new ApiError(said?.error ?? `The server answered ${response.status}.`, response.status);
}

/** @param {string} id @param {string} part @param {Record<string, any>} [query] */
export const askRun = (id, part, query) => ask(`run/${encodeURIComponent(id)}/${part}`, query);
