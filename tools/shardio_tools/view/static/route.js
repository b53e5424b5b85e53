/** The state of the page in its URL: `#/page/argument?key=value`. */

import { FILTERS } from './api.js';

/** Parse the hash of a link; an unknown page is the overview. */
export function parse(hash) {
  const text = hash.replace(/^#\/?/, '');
  const at = text.indexOf('?');
  const path = at < 0 ? text : text.slice(0, at);
  const [page, ...args] = path.split('/').map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  return { page: page || 'overview', args, params: new URLSearchParams(at < 0 ? '' : text.slice(at + 1)) };
}

/** Return a link to a page: parameters that are null, empty or false are left out. */
export function link(page, arg = null, params = {}) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== null && value !== undefined && value !== '' && value !== false) found.set(name, value === true ? '1' : value);
  }
  const query = found.toString().replaceAll('%3A', ':').replaceAll('%2C', ',');
  const path = page === 'overview' ? '#/' : `#/${page}`;
  return `${path}${arg === null ? '' : `/${encodeURIComponent(arg)}`}${query && `?${query}`}`;
}

/** Go to a link as a step of the history. */
export function go(hash) {
  location.hash = hash;
}

let settled = null;

/** Note that the page shows what the URL says. */
export function settle() {
  settled = location.hash;
}

/** Return true if the page shows what the URL says. */
export function isSettled() {
  return location.hash === settled;
}

/** Change the URL in place: no step of the history, no new page. A link just followed is kept. */
export function replace(hash) {
  if (!isSettled()) return;
  history.replaceState(history.state, '', hash);
  settle();
}

/** Return the filters among the parameters of a link. */
export function filtersOf(params) {
  const found = {};
  for (const name of FILTERS) if (params.get(name)) found[name] = params.get(name);
  return found;
}
