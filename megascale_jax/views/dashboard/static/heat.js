// The three drawings of the heat map. The two by device share their columns: what is zoomed in one is zoomed in both.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const first = byId("grid-passes");
  if (!first) return;
  const readout = byId("readout"), hint = readout.textContent;
  const least = 8;
  let facts = null, source = "", grids_ = [], frame = 0;
  const views = { device: { from: 0, to: 1 }, place: { from: 0, to: 1 } };

  const draw = () => { frame ||= requestAnimationFrame(() => { frame = 0; if (facts) for (const one of grids_) one.grid.draw(views[one.axis]); }); };
  const clamp = (view, size) => {
    const span = Math.min(Math.max(view.to - view.from, Math.min(least, size)), size);
    view.from = Math.min(Math.max(view.from, 0), size - span);
    view.to = view.from + span;
  };
  const zoom = (one, factor, around) => {
    const view = views[one.axis], at = around ?? (view.from + view.to) / 2;
    view.from = at - (at - view.from) * factor;
    view.to = at + (view.to - at) * factor;
    clamp(view, one.grid.columns);
    draw();
  };
  const percent = (value) => (value === grids.UNKNOWN ? "not known" : `${value > 0 ? "+" : value < 0 ? "−" : ""}${(Math.abs(value) / 100).toFixed(1)} %`);
  const place = (device) => {
    const [, data, tensor] = facts.mesh;
    return `pipe ${Math.floor(device / (data * tensor))} data ${Math.floor(device / tensor) % data} tensor ${device % tensor}`;
  };
  const told = (device, of, value) => {
    const rank = facts.rank[device] >= 0 ? `, rank ${facts.rank[device]}` : "", host = facts.hosts[facts.host[device]];
    const isSlow = facts.slow.some(([slow, name]) => slow === device && of.startsWith(name));
    return `device ${device}${rank}${host ? `, ${visible(host)}` : ""} · ${place(device)} · ${of}: ${percent(value)}${isSlow ? " · slow" : ""}`;
  };
  // The same as the server does with names: signs that are not seen are written out.
  const visible = (text) => text.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu, (sign) => `\\u${sign.codePointAt(0).toString(16).padStart(4, "0")}`);
  const deviceOf = (one, cell) => (one.axis === "device" ? cell[1] : cell[0] * facts.mesh[1] * facts.mesh[2] + cell[1]);
  const show = (one, cell) => {
    for (const other of grids_) other.grid.cursor = null;
    one.grid.cursor = cell;
    readout.textContent = cell ? told(deviceOf(one, cell), one.name(cell[0]), one.grid.value(...cell)) : hint;
    draw();
  };

  const build = () => {
    const [pipe, data, tensor] = facts.mesh, count = pipe * data * tensor, chosen = facts.passes.indexOf(facts.chosen);
    const shared = { span: facts.span, columns: count, columnTitle: "device", columnLabel: String };
    const steps = facts.steps.length, slow = facts.slow;
    const options = [
      { ...shared, rows: facts.passes.length, rowHeight: 26, value: (row, column) => facts.excess[row * count + column],
        rowLabel: (row) => facts.passes[row], rings: slow.map(([device, name]) => [facts.passes.indexOf(name), device]) },
      { ...shared, rows: steps, rowHeight: 8, mostHeight: 360, value: (row, column) => facts.by_step[row * count + column],
        rowLabel: (row) => `step ${facts.steps[row]}`, rings: [] },
      { ...shared, rows: pipe, columns: data * tensor, rowHeight: 26, mostHeight: 300, lines: tensor > 1 ? tensor : 0,
        value: (row, column) => facts.excess[chosen * count + row * data * tensor + column],
        rowLabel: (row) => `pipe ${row}`, columnTitle: tensor > 1 ? `${tensor} · data + tensor` : "data",
        rings: slow.filter(([, name]) => name === facts.chosen).map(([device]) => [Math.floor(device / (data * tensor)), device % (data * tensor)]) },
    ];
    const names = [(row) => facts.passes[row], (row) => `${facts.chosen} in step ${facts.steps[row]}`, () => facts.chosen];
    const isSame = grids_.length && grids_.every((one, n) => one.grid.columns === options[n].columns);
    if (!grids_.length) {
      grids_ = ["grid-passes", "grid-steps", "grid-mesh"].map((id, n) => ({ grid: new grids.Grid(byId(id), options[n]), axis: n < 2 ? "device" : "place" }));
      grids_.forEach(listen);
    }
    grids_.forEach((one, n) => {
      one.grid.set(options[n]);
      one.name = names[n];
      if (one.grid.cursor && one.grid.cursor[0] >= options[n].rows) one.grid.cursor = null;
    });
    if (!isSame) for (const one of grids_) Object.assign(views[one.axis], { from: 0, to: one.grid.columns });
    first.closest(".drawings").dataset.drawn = "yes";
    draw();
  };

  const listen = (one) => {
    const canvas = one.grid.canvas;
    let grip = null;
    canvas.addEventListener("pointermove", (event) => {
      const view = views[one.axis];
      if (grip) {
        const moved = ((grip.x - event.offsetX) / one.grid.width) * (view.to - view.from);
        view.from += moved; view.to += moved; grip.x = event.offsetX;
        clamp(view, one.grid.columns);
      }
      show(one, one.grid.cellAt(event.offsetX, event.offsetY, view));
    });
    canvas.addEventListener("pointerdown", (event) => { grip = { x: event.offsetX }; canvas.setPointerCapture(event.pointerId); });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { grip = null; });
    canvas.addEventListener("dblclick", (event) => zoom(one, 0.25, one.grid.columnAt(event.offsetX, views[one.axis])));
    canvas.addEventListener("wheel", (event) => {
      if (!(event.ctrlKey || event.metaKey || document.activeElement === canvas)) return;
      event.preventDefault();
      zoom(one, event.deltaY > 0 ? 1.25 : 0.8, one.grid.columnAt(event.offsetX, views[one.axis]));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [0, -64], PageDown: [0, 64] };
      const view = views[one.axis], grid = one.grid;
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      if (moves[event.key]) {
        const [row, column] = grid.cursor || grid.rings[0] || [0, Math.floor(view.from)];
        const [down, right] = grid.cursor ? moves[event.key] : [0, 0];
        const cell = [Math.min(Math.max(row + down, 0), grid.rows - 1), Math.min(Math.max(column + right, 0), grid.columns - 1)];
        const span = view.to - view.from;
        if (cell[1] < view.from) { view.from = cell[1]; view.to = view.from + span; }
        if (cell[1] + 1 > view.to) { view.to = cell[1] + 1; view.from = view.to - span; }
        clamp(view, grid.columns);
        show(one, cell);
      } else if (event.key === "+" || event.key === "=") zoom(one, 0.5, grid.cursor?.[1]);
      else if (event.key === "-") zoom(one, 2, grid.cursor?.[1]);
      else if (event.key === "0") zoom(one, 1e9);
      else if (event.key === "Enter" && grid.cursor && facts.rank[deviceOf(one, grid.cursor)] >= 0) location.href = `/cube?rank=${facts.rank[deviceOf(one, grid.cursor)]}`;
      else return;
      event.preventDefault();
    });
  };
  for (const [id, factor] of [["zoom-in", 0.5], ["zoom-out", 2], ["zoom-all", 1e9]]) byId(id).addEventListener("click", () => grids_.forEach((one, n) => n && zoom(one, factor)));

  const load = async () => {
    const wanted = first.dataset.src;
    if (!wanted || wanted === source) return;
    source = wanted;
    try {
      const found = await packed.load(wanted);
      if (found.missing) { source = ""; readout.textContent = found.missing; return; }
      facts = found;
      build();
    } catch (error) {
      source = "";
      readout.textContent = `The numbers could not be fetched (${error.message}); they are asked for again.`;
    }
  };
  document.addEventListener("fresh", load);
  document.addEventListener("theme", draw);
  new ResizeObserver(draw).observe(first);
  load();
})();
