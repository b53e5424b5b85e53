/** A notice that a newer generation of the dataset can be shown. */

import { h, fill, iconButton, count, counted, toast } from './dom.js';
import { api, isStatic } from './api.js';
import { store } from './store.js';

const CHECK_MS = 5000;
let dismissed = null;

/** Look for a newer generation while the page is visible. */
export function watchGeneration() {
  if (isStatic) return;
  const again = () => { if (document.visibilityState === 'visible') checkGeneration(); };
  setInterval(again, CHECK_MS);
  window.addEventListener('focus', again);
}

/** Show or remove the notice. */
export async function checkGeneration() {
  let found;
  try { found = await api.generation(); } catch { return; } // requests of the page say what is wrong
  const number = found.newer?.generation ?? found.shown;
  const node = document.getElementById('update');
  const isShown = number !== null && number !== dismissed && (found.newer || number !== store.dataset.generation);
  if (node.dataset.generation === (isShown ? String(number) : undefined)) return;
  if (!isShown) { delete node.dataset.generation; return fill(node); }
  node.dataset.generation = number;
  const show = h('a', { href: '#/', onclick: (event) => { event.preventDefault(); showGeneration(found.newer); } }, `Show generation ${count(number)}`);
  fill(node, h('p', {}, describe(found.newer, number), ' ', show), iconButton('close', 'Dismiss', () => { dismissed = number; checkGeneration(); }));
}

function describe(newer, number) {
  if (!newer) return `Another page shows generation ${count(number)} of the dataset.`;
  const marks = store.marks.size ? `: ${counted(store.marks.size, 'mark')} will be removed` : '';
  if (newer.rows === 'changed') return `Another dataset was written here, with other rows${marks}.`;
  const more = newer.n_samples - store.dataset.n_samples;
  return `The dataset has a new generation, ${newer.rows === 'appended' ? `with ${counted(more, 'more sample')}` : 'with the same samples'}.`;
}

async function showGeneration(newer) {
  try {
    if (newer) await api.reload();
    if (newer?.rows === 'changed') history.replaceState(history.state, '', '#/'); // links to rows would show others
    location.reload();
  } catch (error) { toast(`${error.message} ${error.hint ?? ''}`, true); }
}
