/** What all pages share: the dataset, and the marks with their notes. */

import { api, isStatic } from './api.js';
import { toast } from './dom.js';

export const store = { dataset: null, marks: new Map() };
/** Return a message without the path of the dataset, which the page shows anyway. */
export function withoutPath(text) {
  return text.replaceAll(`${store.dataset.path.replace(/\/+$/, '')}/`, '');
}

const listeners = new Set();

/** Call `run` after each change of the marks; returns the function that ends this. */
export function onMarks(run) {
  listeners.add(run);
  return () => listeners.delete(run);
}

function changed() {
  for (const run of listeners) run();
}

export async function loadDataset() {
  store.dataset = { fields: [], classes: [], subsets: [], generations: [], problems: [], ...await api.dataset() };
  return store.dataset;
}

export async function loadMarks() {
  const found = await api.marks();
  store.marks = new Map(found.marks.map((each) => [each.row, each.note ?? '']));
  changed();
}

let last = Promise.resolve(); // the server gets changes one after the other, in their order

/** Mark or unmark a row, or change its note. The page changes at once, and back if that fails. */
export async function setMark(row, marked, note = '') {
  if (isStatic) return toast('Samples of an exported page cannot be marked.', true);
  const before = store.marks.get(row);
  if (marked) store.marks.set(row, note); else store.marks.delete(row);
  changed();
  try {
    const sent = last.then(() => api.mark(row, marked, note));
    last = sent.catch(() => {});
    await sent;
  } catch (error) {
    if (before === undefined) store.marks.delete(row); else store.marks.set(row, before);
    changed();
    toast(`${error.message} ${error.hint ?? ''}`, true);
  }
}

export function toggleMark(row) {
  const marked = !store.marks.has(row);
  setMark(row, marked);
  if (!isStatic) toast(marked ? `Marked sample ${row.toLocaleString('en-US')}.` : `Removed the mark of sample ${row.toLocaleString('en-US')}.`);
}
