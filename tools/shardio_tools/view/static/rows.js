/** Rows of a query, in pages that are fetched when needed and kept in a bounded cache. */

import { api } from './api.js';

const PAGE = 100;
const MAX_PAGES = 80;
const POLL_MS = 400;
const RETRY_MS = 2000;

export class Rows {
  constructor(filters, changed, failed) {
    this.filters = filters;
    this.changed = changed;
    this.failed = failed;
    this.n = null;
    this.nTotal = 0;
    this.complete = false;
    this.progress = 0;
    this.pages = new Map();
    this.waiting = new Map();
    this.abort = new AbortController();
    this.timer = 0;
    this.isRetrying = false;
  }

  /** Return the row at a position, or null while it is being fetched. */
  at(position) {
    const page = Math.floor(position / PAGE);
    const found = this.pages.get(page);
    return found?.[position - page * PAGE] ?? null;
  }

  /** Fetch what is missing between two positions, and give up requests for other places. */
  want(start, stop) {
    const first = Math.floor(start / PAGE);
    const last = Math.floor(Math.max(start, stop - 1) / PAGE);
    for (const [page, abort] of this.waiting) {
      if (page < first - 1 || page > last + 1) { abort.abort(); this.waiting.delete(page); }
    }
    for (let page = first; page <= last; page++) {
      const kept = this.pages.get(page);
      if (kept) { this.pages.delete(page); this.pages.set(page, kept); } // the most recently used is the last
      else if (!this.waiting.has(page)) this.fetch(page);
    }
    this.span = [first, last];
  }

  async fetch(page) {
    const abort = new AbortController();
    this.abort.signal.addEventListener('abort', () => abort.abort(), { signal: abort.signal });
    this.waiting.set(page, abort);
    try {
      const found = await api.rows(page * PAGE, PAGE, this.filters, abort.signal);
      if (this.waiting.get(page) === abort) this.waiting.delete(page);
      this.take(page, found);
    } catch (error) {
      if (this.waiting.get(page) === abort) this.waiting.delete(page);
      if (this.abort.signal.aborted) return;
      const isAborted = error.name === 'AbortError'; // by `want`: other rows are visible now
      if (!isAborted) {
        if (!this.isRetrying) this.failed(error);
        if (error.status >= 400 && error.status < 500) return; // it would fail again
        this.isRetrying = this.n !== null;
      }
      if (this.n !== null && !this.complete) this.poll(isAborted ? POLL_MS : RETRY_MS); // the server is still searching
    } finally { abort.abort(); }
  }

  take(page, found) {
    if (this.abort.signal.aborted) return;
    this.isRetrying = false;
    if (found.complete && !this.complete) this.pages.clear(); // sorted and counted anew since
    Object.assign(this, { n: found.n, nTotal: found.n_total, complete: found.complete, progress: found.progress ?? 0, text: found.text ?? '' });
    this.pages.set(page, found.rows);
    for (const key of this.pages.keys()) {
      if (this.pages.size <= MAX_PAGES) break;
      this.pages.delete(key);
    }
    if (!found.complete) this.poll(POLL_MS);
    this.changed();
  }

  poll(delay) {
    this.timer ||= setTimeout(() => { this.timer = 0; this.refresh(); }, delay);
  }

  /** Ask again for what is visible: a scan has found more. */
  refresh() {
    const [first, last] = this.span ?? [0, 0];
    for (let page = first; page <= last; page++) {
      if ((this.pages.get(page)?.length ?? 0) < PAGE || page === first) this.fetch(page);
    }
  }

  close() {
    this.abort.abort();
    clearTimeout(this.timer);
  }
}
