// The cube of ranks, seen from above without perspective: cells look alike then, so each colour is painted once and copied, which turns
// 12,288 of them smoothly. x: data, y: tensor upwards, z: pipe backwards. Drawn from far to near, axis by axis.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const canvas = byId("cube");
  if (!canvas) return;
  const readout = byId("readout"), NONE = 255, COLOURS = 7, FADED = 0.4, SMALL = 24;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  let facts = null, source = "", frame = 0, look = null, chosen = -1, timer = 0;
  let view = null, layout = null, kinds = null;

  const size = () => facts.mesh;
  const placeOf = (device) => [Math.floor(device / (size()[1] * size()[2])), Math.floor(device / size()[2]) % size()[1], device % size()[2]];
  const deviceAt = (pipe, data, tensor) => (pipe * size()[1] + data) * size()[2] + tensor;
  const start = () => ({ turn: size()[0] * 2.2 > size()[1] * 1.2 ? -1.0 : -0.42, tilt: 0.5, zoom: 1 });

  // Spacing of cells in each axis; short axes are drawn out where another is long, so that all three are seen.
  const arrange = () => {
    const [pipe, data, tensor] = size();
    const long = Math.max(data * 1.25, pipe * 2.2, tensor * 1.25);
    const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
    const step = { z: clamp(long / (pipe * 3), 2.2, 9), x: clamp(long / (data * 6), 1.25, 3), y: clamp(long / (tensor * 8), 1.25, 3) };
    const half = { x: 0.42 * Math.min(step.x, 1.6), y: 0.42 * Math.min(step.y, 1.6), z: 0.42 * Math.min(step.x, 1.6) };
    layout = { step, half, mid: { x: ((data - 1) * step.x) / 2, y: ((tensor - 1) * step.y) / 2, z: ((pipe - 1) * step.z) / 2 } };
  };
  const looks = () => {
    if (look) return look;
    const states = [...Array(COLOURS).keys()].map((n) => css(`--state-${n}`));
    look = { states, other: css("--state-other"), named: css("--state-named"), suspect: css("--state-suspect"), silent: css("--state-silent"),
      text: css("--text"), muted: css("--muted"), surface: css("--surface"), line: css("--line-strong"), accent: css("--accent") };
    return look;
  };
  // What a device looks like: the colour of its operation, or one of these, counted on.
  const KINDS = ["named", "suspect", "silent", "other"];
  const kindOf = (device) => {
    const state = facts.states[facts.state[device]], kind = { stuck: "named", suspect: "suspect", silent: "silent", undefined: "silent" }[state];
    if (kind) return COLOURS + KINDS.indexOf(kind);
    return facts.operation[device] === NONE ? COLOURS + KINDS.indexOf("other") : facts.operation[device];
  };

  const projection = () => {
    const width = canvas.clientWidth, height = canvas.clientHeight, { step, half, mid } = layout, [pipe, data, tensor] = size();
    const c = Math.cos(view.turn), s = Math.sin(view.turn), ct = Math.cos(view.tilt), st = Math.sin(view.tilt);
    const to = (x, y, z) => [x * c - z * s, y * ct + (x * s + z * c) * st];
    let wide = 0, high = 0;
    for (const i of [-1, 1]) for (const j of [-1, 1]) for (const k of [-1, 1]) {
      const [X, Y] = to(i * (mid.x + half.x), j * (mid.y + half.y), k * (mid.z + half.z));
      wide = Math.max(wide, X); high = Math.max(high, Y);
    }
    const scale = Math.max(Math.min((width / 2 - 56) / wide, (height / 2 - 44) / high, 64), 0.5) * view.zoom;
    const focus = view.zoom > 1 && chosen >= 0 ? placeOf(chosen) : null;
    const [fx, fy] = focus ? to(focus[1] * step.x - mid.x, focus[2] * step.y - mid.y, focus[0] * step.z - mid.z) : [0, 0];
    const at = (p, d, t) => {
      const [X, Y] = to(d * step.x - mid.x, t * step.y - mid.y, p * step.z - mid.z);
      return [width / 2 + (X - fx) * scale, height / 2 - (Y - fy) * scale];
    };
    // A step along an axis that goes away from the viewer is drawn first; y never does, we look from above.
    const order = (count, isAway) => [...Array(count).keys()].map((n) => (isAway ? count - 1 - n : n));
    return { to, scale, at, width, height, c, s, pipes: order(pipe, c > 0), datas: order(data, s > 0), tensors: order(tensor, false) };
  };

  const reachOf = (seen) => Math.ceil((layout.half.x + layout.half.y + layout.half.z) * seen.scale) + 2;
  // A cell painted once: top, and the two sides that are seen. With ``stride``, of an image's rows, as its pixels: copying those of a small
  // cell takes a tenth of the time that a canvas takes for a picture.
  const painted = (colour, seen, ratio, isHollow, isFaded, stride) => {
    const { half } = layout, { to, scale, c, s } = seen;
    const sx = s > 0 ? -1 : 1, sz = c > 0 ? -1 : 1, h = half;
    const faces = [
      [[-1, 1, -1], [1, 1, -1], [1, 1, 1], [-1, 1, 1]],
      [[sx, -1, -1], [sx, 1, -1], [sx, 1, 1], [sx, -1, 1]],
      [[-1, -1, sz], [1, -1, sz], [1, 1, sz], [-1, 1, sz]],
    ];
    const reach = reachOf(seen), stamp = document.createElement("canvas"), side = stamp.width = stamp.height = Math.round(2 * reach * ratio);
    const paper = stamp.getContext("2d", { willReadFrequently: Boolean(stride) });
    paper.setTransform(ratio, 0, 0, ratio, reach * ratio, reach * ratio);
    faces.forEach((face, n) => {
      paper.beginPath();
      for (const [i, j, k] of face) { const [X, Y] = to(i * h.x, j * h.y, k * h.z); paper.lineTo(X * scale, -Y * scale); }
      paper.closePath();
      if (isHollow) { paper.globalAlpha = isFaded ? 0.5 : 1; paper.strokeStyle = looks().line; paper.lineWidth = 1; paper.stroke(); return; }
      const part = isFaded ? FADED : 1;
      paper.fillStyle = looks().surface; paper.globalAlpha = 1; paper.fill();
      paper.fillStyle = colour; paper.globalAlpha = part; paper.fill();
      paper.fillStyle = "#000"; paper.globalAlpha = [0, 0.2, 0.34][n] * part; paper.fill();
    });
    if (!stride) return { canvas: stamp };
    const all = new Uint32Array(paper.getImageData(0, 0, side, side).data.buffer), offsets = [], words = [], middle = Math.round(side / 2);
    all.forEach((word, n) => { if (word >>> 24 > 127) { offsets.push((Math.floor(n / side) - middle) * stride + (n % side) - middle); words.push(word | 0xff000000); } });
    return { offsets: Int32Array.from(offsets), words: Uint32Array.from(words) };
  };

  const paint = () => {
    frame = 0;
    if (!facts || !canvas.clientWidth || !canvas.clientHeight) return;
    const began = performance.now(), ratio = Math.min(devicePixelRatio || 1, 2), all = looks();
    const width = Math.round(canvas.clientWidth * ratio), height = Math.round(canvas.clientHeight * ratio);
    if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
    const paper = canvas.getContext("2d"), seen = projection();
    paper.setTransform(1, 0, 0, 1, 0, 0);
    paper.clearRect(0, 0, width, height);
    paper.setTransform(ratio, 0, 0, ratio, 0, 0);
    const stamps = [], colour = (kind) => (typeof kind === "number" ? all.states[kind] : all[kind]);
    const own = chosen >= 0 ? placeOf(chosen) : null, radius = layout.half.x * seen.scale, [, datas, tensors] = size();
    const [x0, y0] = seen.at(0, 0, 0), [px, py, dx, dy, tx, ty] = [[1, 0, 0], [0, 1, 0], [0, 0, 1]].flatMap((one) => { const [x, y] = seen.at(...one); return [x - x0, y - y0]; });
    const reach = reachOf(seen), isSmall = reach * ratio <= SMALL, pad = Math.ceil(reach * ratio) + Math.ceil(20 * ratio);
    const image = isSmall ? new ImageData(width + 2 * pad, height + 2 * pad) : null, pixels = image && new Uint32Array(image.data.buffer);
    const stampOf = (device, isFaded) => {
      const code = kinds[device], kind = code < COLOURS ? code : KINDS[code - COLOURS];
      return (stamps[2 * code + (isFaded ? 1 : 0)] ||= painted(colour(kind), seen, ratio, kind === "silent", isFaded, isSmall && width + 2 * pad));
    };
    const put = (device, x, y, isFaded) => {
      const stamp = stampOf(device, isFaded);
      if (!isSmall) { paper.drawImage(stamp.canvas, x - reach, y - reach, 2 * reach, 2 * reach); return; }
      const at = (Math.round(y * ratio) + pad) * (width + 2 * pad) + Math.round(x * ratio) + pad, { offsets, words } = stamp;
      for (let n = 0; n < offsets.length; n++) pixels[at + offsets[n]] = words[n];
    };
    const first = [];
    for (const pipe of seen.pipes) for (const data of seen.datas) {
      const x = x0 + pipe * px + data * dx, y = y0 + pipe * py + data * dy, row = (pipe * datas + data) * tensors;
      for (let tensor = 0; tensor < tensors; tensor++) {
        const cx = x + tensor * tx, cy = y + tensor * ty;
        if (cx < -20 || cy < -20 || cx > seen.width + 20 || cy > seen.height + 20) continue;
        if (kinds[row + tensor] < COLOURS + 2 && kinds[row + tensor] >= COLOURS) first.push([row + tensor, cx, cy]);
        put(row + tensor, cx, cy, own !== null && (pipe === own[0]) + (data === own[1]) + (tensor === own[2]) < 2);
      }
    }
    // What this page is for is not to be hidden by what stands before it.
    for (const [device, x, y] of first) put(device, x, y, false);
    if (isSmall) paper.putImageData(image, -pad, -pad);
    labels(paper, seen, all, own, radius);
    canvas.dataset.paintMs = (performance.now() - began).toFixed(1);
  };

  const tag = (paper, all, text, x, y, colour, align = "center") => {
    paper.font = "600 12px system-ui, sans-serif";
    paper.textAlign = align; paper.textBaseline = "middle";
    paper.lineWidth = 4; paper.strokeStyle = all.surface; paper.lineJoin = "round";
    paper.strokeText(text, x, y);
    paper.fillStyle = colour; paper.fillText(text, x, y);
  };
  const labels = (paper, seen, all, own, radius) => {
    const [pipe, data, tensor] = size(), near = seen.pipes.at(-1), front = 0, side = seen.datas[0], off = radius * 2.4 + 12;
    if (!facts.is_mesh) tag(paper, all, "ranks in their order: no mesh is stated", seen.width / 2, seen.height - 14, all.muted);
    else {
      const name = (text, count, from, to, dx, dy) => {
        if (count < 2) return;
        const [x0, y0] = seen.at(...from), [x1, y1] = seen.at(...to);
        tag(paper, all, `${text} 0–${count - 1}`, Math.min(Math.max((x0 + x1) / 2 + dx, 44), seen.width - 44), Math.min(Math.max((y0 + y1) / 2 + dy, 12), seen.height - 12), all.muted);
      };
      name("data", data, [near, 0, front], [near, data - 1, front], 0, off);
      const outer = seen.s > 0 ? 0 : data - 1;
      name("pipe", pipe, [0, outer, front], [pipe - 1, outer, front], (outer ? 1 : -1) * (off + 14), off * 0.6);
      const edge = outer ? 0 : data - 1;
      name("tensor", tensor, [near, edge, 0], [near, edge, tensor - 1], (edge ? 1 : -1) * (off + 24), 0);
    }
    if (own) {
      const axes = [["tensor", [own[0], own[1], 0], [own[0], own[1], tensor - 1]], ["pipe", [0, own[1], own[2]], [pipe - 1, own[1], own[2]]], ["data", [own[0], 0, own[2]], [own[0], data - 1, own[2]]]];
      for (const [, from, to] of axes) {
        const [x0, y0] = seen.at(...from), [x1, y1] = seen.at(...to);
        paper.beginPath(); paper.moveTo(x0, y0); paper.lineTo(x1, y1);
        paper.lineWidth = 1.5; paper.strokeStyle = all.accent; paper.setLineDash([5, 4]); paper.stroke(); paper.setLineDash([]);
      }
      const [x, y] = seen.at(...own);
      paper.beginPath(); paper.arc(x, y, Math.max(radius * 1.5, 8), 0, 2 * Math.PI);
      paper.lineWidth = 4; paper.strokeStyle = all.surface; paper.stroke();
      paper.lineWidth = 2; paper.strokeStyle = all.accent; paper.stroke();
    }
    const told = new Set();
    facts.state.forEach((code, device) => {
      const state = facts.states[code], rank = facts.rank[device];
      if ((state !== "stuck" && state !== "suspect") || told.size >= 12 || told.has(rank)) return;
      told.add(rank);
      const [x, y] = seen.at(...placeOf(device)), mark = state === "stuck" ? all.named : all.suspect, out = Math.max(radius * 1.9, 12);
      paper.beginPath(); paper.arc(x, y, out, 0, 2 * Math.PI);
      paper.lineWidth = 5; paper.strokeStyle = all.surface; paper.stroke();
      paper.lineWidth = 2.5; paper.strokeStyle = mark; paper.stroke();
      tag(paper, all, `rank ${rank}${state === "suspect" ? "?" : ""}`, x, y - out - 10, all.text);
    });
    if (own && !told.has(facts.rank[chosen])) { const [x, y] = seen.at(...own); tag(paper, all, facts.rank[chosen] < 0 ? "?" : `rank ${facts.rank[chosen]}`, x, y - Math.max(radius * 1.5, 8) - 10, all.text); }
  };

  const draw = () => { frame ||= requestAnimationFrame(paint); };
  const tell = () => {
    if (chosen < 0) { readout.textContent = "No rank is chosen."; return; }
    const [pipe, data, tensor] = placeOf(chosen), rank = facts.rank[chosen], operation = facts.operation[chosen];
    const does = operation === NONE ? "" : ` · ${visible(facts.operations[operation])}`;
    readout.textContent = `${rank < 0 ? "a device that no rank says is its own" : `rank ${rank}`} · pipe ${pipe} data ${data} tensor ${tensor}${rank < 0 ? "" : ` · ${facts.states[facts.state[chosen]]}${does}`}`;
  };
  const visible = (text) => text.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu, (sign) => `\\u${sign.codePointAt(0).toString(16).padStart(4, "0")}`);
  const choose = (device) => {
    if (device < 0 || device === chosen) return;
    const before = chosen < 0 ? -1 : facts.rank[chosen];
    chosen = device;
    tell();
    draw();
    clearTimeout(timer);
    if (facts.rank[device] >= 0 && facts.rank[device] !== before) timer = setTimeout(() => dashboard.go({ rank: facts.rank[device] }), 120);
  };
  const nearest = (x, y) => {
    const seen = projection(), reach = Math.max(layout.half.x * seen.scale * 1.8, 10);
    let best = -1, least = reach * reach;
    for (const pipe of seen.pipes) for (const data of seen.datas) for (const tensor of seen.tensors) {
      const [cx, cy] = seen.at(pipe, data, tensor), away = (cx - x) ** 2 + (cy - y) ** 2;
      if (away <= least) { least = away; best = deviceAt(pipe, data, tensor); }
    }
    return best;
  };
  const turn = (by, tilt) => { view.turn += by; view.tilt = Math.min(Math.max(view.tilt + tilt, 0.12), 1.4); draw(); };
  const zoom = (factor) => { view.zoom = Math.min(Math.max(view.zoom * factor, 1), 40); draw(); };

  let grip = null;
  canvas.addEventListener("pointerdown", (event) => { grip = { x: event.offsetX, y: event.offsetY, moved: 0 }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (!grip || !facts) return;
    const dx = event.offsetX - grip.x, dy = event.offsetY - grip.y;
    grip = { x: event.offsetX, y: event.offsetY, moved: grip.moved + Math.abs(dx) + Math.abs(dy) };
    if (grip.moved > 4) turn(dx * 0.008, dy * 0.006);
  });
  canvas.addEventListener("pointerup", (event) => { if (grip && grip.moved <= 4 && facts) choose(nearest(event.offsetX, event.offsetY)); grip = null; });
  canvas.addEventListener("pointercancel", () => { grip = null; });
  canvas.addEventListener("wheel", (event) => {
    if (!facts || !(event.ctrlKey || event.metaKey || document.activeElement === canvas)) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 0.85 : 1.18);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    if (!facts || event.altKey || event.ctrlKey || event.metaKey) return;
    const turns = { ArrowLeft: [-0.12, 0], ArrowRight: [0.12, 0], ArrowUp: [0, 0.1], ArrowDown: [0, -0.1] };
    const moves = { ArrowLeft: [0, -1, 0], ArrowRight: [0, 1, 0], ArrowUp: [0, 0, 1], ArrowDown: [0, 0, -1], PageUp: [1, 0, 0], PageDown: [-1, 0, 0] };
    if (event.shiftKey && turns[event.key]) turn(...turns[event.key]);
    else if (moves[event.key]) {
      const at = chosen < 0 ? [0, 0, 0] : placeOf(chosen), by = chosen < 0 ? [0, 0, 0] : moves[event.key];
      choose(deviceAt(...at.map((one, axis) => Math.min(Math.max(one + by[axis], 0), size()[axis] - 1))));
    } else if (event.key === "+" || event.key === "=") zoom(1.4);
    else if (event.key === "-") zoom(1 / 1.4);
    else if (event.key === "0") { view = start(); draw(); }
    else if (event.key.toLowerCase() === "n" && facts.looked_for.length) {
      const at = facts.looked_for.indexOf(chosen < 0 ? -1 : facts.rank[chosen]);
      choose(facts.rank.indexOf(facts.looked_for[(at + 1) % facts.looked_for.length]));
    } else return;
    event.preventDefault();
  });
  byId("zoom-in").addEventListener("click", () => facts && zoom(1.4));
  byId("zoom-out").addEventListener("click", () => facts && zoom(1 / 1.4));
  byId("zoom-all").addEventListener("click", () => { if (facts) { view = start(); draw(); } });

  const load = async () => {
    const wanted = canvas.dataset.src;
    if (!wanted || wanted === source) return;
    source = wanted;
    try {
      const found = await packed.load(wanted);
      if (found.missing) { source = ""; readout.textContent = found.missing; return; }
      const isNew = !facts || facts.mesh.join() !== found.mesh.join();
      facts = found;
      kinds = Uint8Array.from(facts.state, (_, device) => kindOf(device));
      if (isNew) {
        arrange();
        view = start();
        const asked = new URLSearchParams(location.search).get("rank"), rank = asked ? Number(asked) : facts.looked_for[0];
        chosen = rank === undefined ? -1 : facts.rank.indexOf(rank);
      }
      tell();
      canvas.closest(".drawings").dataset.drawn = "yes";
      draw();
    } catch (error) {
      source = "";
      readout.textContent = `The cube could not be fetched (${error.message}); it is asked for again.`;
    }
  };
  document.addEventListener("fresh", load);
  document.addEventListener("theme", () => { look = null; draw(); });
  new ResizeObserver(draw).observe(canvas);
  load();
})();
