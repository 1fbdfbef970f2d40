// Zoom of a step's picture: the picture becomes wider within its frame, which scrolls. Buttons, keys (+, -, 0, arrows) and
// Ctrl with the wheel; without this script the whole step is there at its first width.
"use strict";
(() => {
  const MOST = 8;
  const frame = () => document.querySelector(".timeline .view");
  const zoomOf = (view) => Number(view.dataset.zoom || 0);
  const set = (view, zoom, atShare) => {
    const to = Math.max(0, Math.min(MOST, zoom)), from = zoomOf(view);
    if (to === from) return;
    const share = atShare ?? 0.5, place = (view.scrollLeft + share * view.clientWidth) / view.scrollWidth;
    view.dataset.zoom = to;
    view.querySelector(".shapes").style.width = `calc(max(100%, 900px) * ${2 ** to})`;
    view.scrollLeft = place * view.scrollWidth - share * view.clientWidth;
    const said = document.getElementById("zoom");
    if (said) said.textContent = `${2 ** to}×`;
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-zoom-by]"), view = frame();
    if (button && view) set(view, button.dataset.zoomBy === "0" ? 0 : zoomOf(view) + Number(button.dataset.zoomBy));
  });
  document.addEventListener("keydown", (event) => {
    const view = frame();
    if (!view || document.activeElement !== view || event.ctrlKey || event.metaKey || event.altKey) return;
    const by = { "+": 1, "=": 1, "-": -1 }[event.key];
    if (by) set(view, zoomOf(view) + by);
    else if (event.key === "0") set(view, 0);
    else if (event.key === "Home") view.scrollLeft = 0;
    else if (event.key === "End") view.scrollLeft = view.scrollWidth;
    else return;
    event.preventDefault();
  });
  document.addEventListener("wheel", (event) => {
    const view = event.target.closest?.(".timeline .view");
    if (!view || !event.ctrlKey) return;
    event.preventDefault();
    const box = view.getBoundingClientRect();
    set(view, zoomOf(view) + (event.deltaY < 0 ? 1 : -1), (event.clientX - box.left) / box.width);
  }, { passive: false });
})();
