/** Damage: verification in the background, and what it has found. */

import { h, fill, count, counted, errorBox, progressBar, toast } from './dom.js';
import { api, isStatic } from './api.js';
import { link } from './route.js';
import { store } from './store.js';

const POLL_MS = 500;

export function show(root, route, signal) {
  const node = h('div', {});
  const problems = store.dataset.problems ?? [];
  fill(root, h('div', { class: 'heading' }, h('h1', {}, 'Damage')),
    problems.length > 0 && h('div', { class: 'notice bad' }, h('p', {}, 'The dataset opens only in part:'), h('ul', {}, problems.map((text) => h('li', {}, text)))), node);
  watch(node, signal);
  return {};
}

async function watch(node, signal) {
  const start = async () => {
    try { await api.startVerification(); } catch (error) { toast(`${error.message} ${error.hint ?? ''}`, true); }
    watch(node, signal);
  };
  while (!signal.aborted) {
    let found;
    try { found = await api.verification(signal); } catch (error) {
      if (error.name !== 'AbortError') fill(node, errorBox(error, () => watch(node, signal)));
      return;
    }
    fill(node, status(found, start), findings(found));
    if (found.state !== 'running') return;
    await new Promise((resolve) => { setTimeout(resolve, POLL_MS); });
  }
}

function status(found, start) {
  const button = (text) => !isStatic && h('button', { type: 'button', onclick: start }, text);
  if (found.state === 'running') return h('div', { class: 'job' }, h('span', { role: 'status' }, `Verified ${extent(found)}, ${counted(found.n_findings, 'finding')}`), progressBar(found.progress ?? null, 'Verification'));
  if (found.state === 'failed') return h('div', { class: 'notice bad' }, h('p', {}, found.text || 'The verification failed.'), h('p', {}, button('Verify again')));
  if (found.state === 'done' || found.state === 'kept') {
    const clean = found.n_findings === 0;
    return h('div', { class: clean ? 'notice' : 'notice warn' }, h('p', { role: 'status' }, clean ? `Verified ${extent(found)}: no damage.` : `Verified ${extent(found)}: ${counted(found.n_findings, 'finding')}.`),
      !clean && !isStatic && h('p', { class: 'hint' }, 'Copy what can be read to a new dataset with ', h('code', {}, `shardio repair ${store.dataset.path} OUTPUT`), '.'), h('p', {}, button('Verify again')));
  }
  return h('div', {}, h('p', {}, 'Verification reads each sample and compares its checksums. It runs in the background, and the rest of the page stays usable.'), h('p', { class: 'section' }, button('Verify the dataset')));
}

/** Return what has been verified so far. */
function extent(found) {
  return found.text || counted(found.n_checked ?? 0, 'shard');
}

function findings(found) {
  if (!found.findings?.length) return null;
  return h('section', { class: 'section', 'aria-label': 'Findings' }, h('header', {}, h('h2', {}, 'Findings'), h('span', { class: 'muted' }, counted(found.n_findings, 'finding'))),
    h('div', { class: 'table', tabindex: 0, role: 'region', 'aria-label': 'Findings' }, h('table', {}, h('thead', {}, h('tr', {}, h('th', {}, 'Sample'), h('th', {}, 'Shard'), h('th', {}, 'Finding'))),
      h('tbody', {}, found.findings.map((each) => h('tr', {}, h('td', { class: 'nowrap' }, each.row === null ? '–' : h('a', { href: link('sample', each.row) }, count(each.row))), h('td', { class: 'mono' }, each.shard ?? ''), h('td', {}, each.field && h('b', {}, `${each.field}: `), each.text)))))),
    found.n_findings > found.findings.length && h('p', { class: 'muted' }, `… and ${count(found.n_findings - found.findings.length)} more`));
}
