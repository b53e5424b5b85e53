/** The overlay with the keys. */

import { h } from './dom.js';

/** Groups of keys; those of one entry are alternatives, or a pair such as back and forward. */
const KEYS = [
  ['Everywhere', [[['o'], 'overview'], [['g'], 'samples'], [['l'], 'what the loader sees'], [['d'], 'damage'], [['b'], 'marks'], [['r'], 'go to a row'],
    [['/'], 'search and filter'], [['c'], 'copy the link'], [['?'], 'this help'], [['Esc'], 'leave a field, close, go up']]],
  ['Samples', [[['←', '↑', '↓', '→'], 'move'], [['PgUp', 'PgDn', 'Home', 'End'], 'move far'], [['Enter'], 'open'], [['m'], 'mark'], [['+', '−'], 'larger, smaller'], [['v'], 'pictures or list']]],
  ['One sample', [[['←', '→', 'k', 'j'], 'previous, next'], [['Space'], 'play or pause'], [[',', '.'], 'frame back, forward'], [['Shift ←', 'Shift →'], 'second back, forward'],
    [['[', ']'], 'start, end of the clip'], [['m'], 'mark'], [['n'], 'note'], [['s'], 'sound on or off']]],
  ['Loader', [[['←', '→', 'k', 'j'], 'batch back, forward'], [['[', ']'], 'epoch back, forward'], [['2'], 'two epochs side by side']]],
];
let dialog = null;

export const isHelpOpen = () => Boolean(dialog?.open);

/** Show the help, or close it. */
export function toggleHelp() {
  if (isHelpOpen()) return dialog.close();
  if (!dialog) {
    dialog = h('dialog', { class: 'help', 'aria-labelledby': 'help-title' },
      h('header', {}, h('h2', { id: 'help-title' }, 'Keys'), h('button', { type: 'button', onclick: () => dialog.close() }, 'Close')),
      h('div', { class: 'help-groups' }, KEYS.map(([title, keys]) => h('section', {}, h('h3', {}, title),
        h('dl', {}, keys.map(([key, text]) => [h('dt', {}, key.map((each) => h('kbd', {}, each))), h('dd', {}, text)]))))),
      h('p', { class: 'muted' }, 'The address bar holds the state: a copied link shows the same samples, filters and time.'));
    dialog.addEventListener('keydown', (event) => { if (event.key === '?') { event.preventDefault(); event.stopPropagation(); dialog.close(); } });
    dialog.addEventListener('click', (event) => { if (event.target === dialog) dialog.close(); });
    document.body.append(dialog);
  }
  dialog.showModal();
}
