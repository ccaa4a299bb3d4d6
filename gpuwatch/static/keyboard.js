// Hands on the page: buttons, rows and keys.

import { byId } from "./dom.js";

const PAN = 0.25;

/** Have clicks and keys do what they say. */
export function listen(actions) {
  document.addEventListener("click", (event) => clicked(event, actions));
  document.addEventListener("keydown", (event) => pressed(event, actions));
}

function clicked(event, actions) {
  const button = event.target.closest("button");
  if (button?.dataset.span) actions.span(Number(button.dataset.span));
  else if (button?.dataset.only) actions.pick(button.dataset.only, false);
  else if (button?.id === "pause") actions.pause();
  else if (button?.id === "zoom-out") actions.back();
  else if (button?.id === "help-open") byId("help").showModal();
  else if (button?.id === "help-close") byId("help").close();
  else {
    const row = event.target.closest("tr[data-gpu]");
    const more = event.ctrlKey || event.metaKey || event.shiftKey;
    if (row && !event.target.closest("a")) actions.pick(row.dataset.gpu, more);
  }
}

function pressed(event, actions) {
  const typing = event.target.closest("input:not([type=range]), select, textarea");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const onSlider = event.target.id === "slider";
  const onButton = event.target.closest("button, a");
  const digit = /^(?:Digit|Numpad)(\d)$/.exec(event.code)?.[1];
  const keys = {
    ArrowLeft: () => actions.pan(-PAN),
    ArrowRight: () => actions.pan(PAN),
    "+": () => actions.zoomBy(0.5),
    "=": () => actions.zoomBy(0.5),
    "-": () => actions.zoomBy(2),
    Escape: () => actions.back(),
    "?": () => byId("help").showModal(),
    Home: () => actions.moment(0),
    End: () => actions.moment(1),
  };
  if (onSlider && /^(Arrow|Home|End|Page)/.test(event.key)) return; // the slider's own keys
  if (event.key === " " && !onButton) actions.pause();
  else if (digit !== undefined && (event.key === digit || event.shiftKey))
    actions.pick(digit, event.shiftKey);
  else if (/^(Home|End)$/.test(event.key) && byId("replay").hidden)
    return; // they scroll the page
  else if (keys[event.key]) keys[event.key]();
  else return;
  event.preventDefault();
}
