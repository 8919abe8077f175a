"use strict";
// The panels: curves, events, goodput, checkpoints and evaluations on one shared horizontal axis.
(() => {
  const { runs, panels } = Report.data, several = runs.length > 1;
  const AXIS = 68, BASE = { info: "--info", warn: "--warn", crit: "--crit" };
  const SEVERITIES = ["info", "warn", "crit"];
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const alpha = (name, share) => `color-mix(in srgb, ${css(name)} ${share * 100}%, transparent)`;
  const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [4, 6], [1, 5], [12, 4]];
  const create = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  Object.assign(Report, { create, css, alpha, severities: SEVERITIES });
  const narrow = () => window.innerWidth < 640;

  // ---------------------------------------------------------------- axes
  const ticks = (low, high, most) => {
    const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= raw) ?? raw;
    const found = [];
    for (let at = Math.ceil(low / step); at * step <= high * (1 + 1e-12); at += 1) found.push(Number((at * step).toPrecision(12)));
    return found;
  };
  const logTicks = (low, high, most) => {
    if (high / low < 8) return ticks(low, high, most);
    const decades = Math.log10(high / low), factors = decades < 2.5 ? [1, 2, 5] : [1], found = [];
    const every = Math.max(1, Math.ceil(decades / most));
    for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1)
      if (factors.length > 1 || power % every === 0)
        for (const factor of factors) {
          const value = Number((factor * 10 ** power).toPrecision(3));
          if (value >= low && value <= high) found.push(value);
        }
    return found;
  };
  // Tick distances of durations are those of a clock.
  const spans = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 432000, 864000, 2592000];
  const xAxis = (shown) => {
    const axis = {
      stroke: () => css("--muted"), grid: { stroke: () => css("--grid"), width: 1 }, ticks: { stroke: () => css("--grid"), size: 4 },
      font: "11px system-ui, sans-serif", size: shown ? 30 : 6, gap: 4, space: 90,
    };
    if (!shown) return { ...axis, values: () => [] };
    const onTime = Report.clocks[Report.clock].column === "written";
    const splits = (u, at, low, high) => {
      const most = Math.max(2, u.width / 110);
      if (!onTime) return ticks(low, high, most);
      const step = spans.find((each) => (high - low) / each <= most) ?? 2592000;
      return Array.from({ length: Math.floor(high / step) - Math.ceil(low / step) + 1 }, (_, index) => (Math.ceil(low / step) + index) * step);
    };
    const date = (value) => {
      const text = Report.format.date(value), inDay = Report.range[1] - Report.range[0] < 1200 ? text.slice(11) : text.slice(11, 16);
      return value % 86400 === 0 ? text.slice(0, 10) : inDay;
    };
    const show = Report.clock === "written" ? date : Report.clocks[Report.clock].show;
    return { ...axis, splits, values: (u, found) => found.map((value) => (value === 0 ? "0" : show(value))) };
  };
  const yAxis = (show, isLog, unit = 1) => ({
    stroke: () => css("--muted"), grid: { stroke: () => css("--grid"), width: 1 }, ticks: { show: false }, size: AXIS, gap: 6,
    font: "11px system-ui, sans-serif",
    splits: (u, at, low, high) => (isLog?.() ? logTicks : ticks)(low / unit, high / unit, Math.max(2, u.height / 45)).map((value) => value * unit),
    filter: (u, found) => found,
    values: (u, found) => found.map((value) => (value === null ? null : show(value))),
  });

  // ---------------------------------------------------------------- one shared range
  let moving = false;
  Report.zoom = (low, high) => {
    Report.range = [low, high];
    moving = true;
    for (const chart of Report.charts) chart.setScale("x", { min: low, max: high });
    moving = false;
    document.dispatchEvent(new Event("zoomed"));
  };
  const follow = (u, key) => {
    if (key !== "x" || moving || !u.ready) return;
    const { min, max } = u.scales.x;
    if (min !== Report.range[0] || max !== Report.range[1]) Report.zoom(min, max);
  };
  // The index nearest to the cursor where a line has a value.
  const nearest = (u, line, index) => {
    const values = u.data[line];
    if (line === 0 || index === null || values[index] != null) return index;
    for (let away = 1; away < 400; away += 1) {
      if (values[index - away] != null) return index - away;
      if (values[index + away] != null) return index + away;
    }
    return index;
  };
  Report.plot = (host, options, data) => {
    const chart = new uPlot({
      width: Math.max(200, host.clientWidth),
      legend: { show: false },
      padding: [8, 26, 0, 0],
      ...options,
      cursor: { sync: { key: "report" }, drag: { x: true, y: false, setScale: false }, y: false, dataIdx: nearest, points: { size: 6 }, ...options.cursor },
      scales: { x: { time: false, range: () => Report.range }, ...options.scales },
      hooks: {
        ...options.hooks,
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          const from = u.posToVal(u.select.left, "x"), to = u.posToVal(u.select.left + u.select.width, "x");
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          Report.zoom(from, to);
        }],
        setScale: [follow],
      },
    }, data, host);
    chart.over.addEventListener("dblclick", () => Report.zoom(...Report.extent()));
    chart.ready = true;
    Report.charts.push(chart);
    return chart;
  };

  // ---------------------------------------------------------------- marks
  Report.events = runs.flatMap((run) => run.events.map((event) => ({ ...event, run, level: SEVERITIES[event.severity] })));
  const shown = (event, least) => event.mark >= least && !Report.groups[event.group]?.hidden;
  const place = (u, event, at = event.at) => {
    const x = Report.onClock(event.run, at);
    return x === null || x === undefined ? null : x;
  };
  const inView = (x) => x !== null && x >= Report.range[0] && x <= Report.range[1];
  const drawMarks = (u) => {
    const { ctx } = u, { top, height } = u.bbox, ratio = uPlot.pxRatio;
    const visible = Report.events.map((event) => [event.group === "start" && event.mark > 0, event, place(u, event)])
      .filter(([isStart, event, x]) => inView(x) && shown(event, isStart ? 1 : 2));
    const strength = Math.min(0.75, Math.max(0.28, u.width / 70 / (visible.length || 1))); // many lines are fainter
    ctx.save();
    for (const [isStart, event, x] of visible) {
      const left = Math.round(u.valToPos(x, "x", true)) + 0.5;
      ctx.strokeStyle = isStart && event.mark < 2 ? alpha("--muted", strength / 3) : alpha(BASE[event.level], strength);
      ctx.lineWidth = ratio;
      ctx.setLineDash(isStart && event.mark < 2 ? [] : [4 * ratio, 3 * ratio]);
      ctx.beginPath(); ctx.moveTo(left, top); ctx.lineTo(left, top + height); ctx.stroke();
    }
    ctx.restore();
  };
  const glyph = (ctx, level, x, y, size) => {
    ctx.beginPath();
    if (level === "crit") { ctx.moveTo(x, y - size); ctx.lineTo(x + size, y); ctx.lineTo(x, y + size); ctx.lineTo(x - size, y); ctx.closePath(); }
    else if (level === "warn") { ctx.moveTo(x, y - size); ctx.lineTo(x + size, y + size * 0.8); ctx.lineTo(x - size, y + size * 0.8); ctx.closePath(); }
    else ctx.arc(x, y, size * 0.8, 0, 7);
  };
  const tip = document.getElementById("tip");
  // Shows what `find(x, y)` returns, lines of text, beside the pointer.
  Report.hover = (u, find) => {
    const move = (event) => {
      const box = u.over.getBoundingClientRect();
      const texts = find(event.clientX - box.left, event.clientY - box.top);
      tip.hidden = !texts.length;
      if (!texts.length) return;
      tip.replaceChildren(...texts.slice(0, 6).map(([head, text]) => create("p", {}, create("b", {}, head), ` ${text}`)));
      const width = tip.offsetWidth, right = Math.min(event.pageX + 14, document.documentElement.clientWidth - width - 6);
      tip.style.left = `${Math.max(4, right)}px`;
      tip.style.top = `${event.pageY + 16}px`;
    };
    u.over.addEventListener("mousemove", move);
    u.over.addEventListener("click", move);
    u.over.addEventListener("mouseleave", () => { tip.hidden = true; });
  };
  Report.describe = (event) => {
    const step = event.at.step === null ? "" : `step ${Report.format.whole(event.at.step)}, `;
    return [`${several ? `${event.run.name}: ` : ""}${event.kind}`, `${step}${Report.format.date(event.at.written)}: ${event.text}`];
  };
  const near = (u, least) => (x) => Report.events
    .filter((event) => shown(event, event.group === "start" && event.mark ? Math.min(1, least) : least))
    .map((event) => [Math.abs((u.valToPos(place(u, event) ?? NaN, "x")) - x), event])
    .filter(([away]) => away <= 5).sort((a, b) => a[0] - b[0]).map(([, event]) => Report.describe(event));

  // ---------------------------------------------------------------- curves
  const color = (line, panel) => `--c${several ? runs.indexOf(line.run) % 8 : panel.traces.indexOf(line.trace) % 8}`;
  const dash = (line, panel) => (several ? DASHES[panel.traces.indexOf(line.trace) % 7] : []);
  // Dots only where they can be told apart.
  const sparse = (u, at, from, to) => {
    let found = 0;
    for (let row = from; row <= to; row += 1) if (u.data[at][row] != null) found += 1;
    return found * 14 < u.width;
  };
  const style = (line, panel, state) => {
    const name = color(line, panel), hidden = () => state.hidden.has(keyOf(line));
    const common = { show: !hidden(), spanGaps: Boolean(line.trace.dots), points: { show: false } };
    if (line.role === "mean" && line.trace.dots) return { ...common, stroke: () => css(name), width: 1.5, dash: [5, 4], points: { show: sparse, size: 5, fill: () => css(name) } };
    if (line.role === "mean") return { ...common, stroke: () => css(name), width: 1.5, dash: dash(line, panel) };
    if (line.role === "left") return { ...common, stroke: () => alpha(name, 0.55), width: 1, dash: [4, 3] };
    return { ...common, stroke: () => alpha(name, 0.4), width: 0.7, points: { show: false } };
  };
  const keyOf = (line) => `${runs.indexOf(line.run)} ${line.trace.column}`;
  const quantiles = (u, lines) => {
    const [from, to] = u.series[0].idxs ?? [0, u.data[0].length - 1], found = [];
    lines.forEach((line, at) => {
      if (line.role !== "mean" || !u.series[at + 1].show) return;
      const every = Math.max(1, Math.floor((to - from) / 1500));
      for (let row = from; row <= to; row += every) if (u.data[at + 1][row] != null) found.push(u.data[at + 1][row]);
    });
    found.sort((a, b) => a - b);
    return found.length ? [found[Math.floor(found.length * 0.01)], found[Math.ceil(found.length * 0.99) - 1]] : null;
  };
  const yRange = (panel, state, lines) => (u, low, high) => {
    if (low === null || high === null) return [0, 1];
    if (state.fit) [low, high] = quantiles(u, lines) ?? [low, high];
    const isLog = state.log;
    if (isLog) {
      low = Math.max(low, high / 1e4);
      const pad = Math.max(1.04, (high / low) ** 0.05);
      return [low / pad, high * pad];
    }
    if (panel.scale === "zero" && !state.fit) low = Math.min(0, low);
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    return [low === 0 && panel.scale === "zero" ? 0 : low - pad, high + pad];
  };
  const keys = (host, panel, lines, state, redraw) => {
    const means = lines.filter((line) => line.role === "mean"), ranges = means.length < 4 && !narrow();
    host.classList.toggle("ranges", ranges);
    const made = means.map((line) => {
      const value = create("b"), swatch = create("i");
      const label = several ? `${line.run.name}${panel.traces.length > 1 ? ` ${line.trace.label}` : ""}` : line.trace.label;
      const button = create("button", { type: "button", className: "key", title: "show or hide" }, swatch, label, value);
      const paint = () => {
        swatch.style.borderTopColor = css(color(line, panel));
        swatch.style.borderTopStyle = dash(line, panel).length || line.trace.dots ? "dashed" : "solid";
        button.setAttribute("aria-pressed", String(!state.hidden.has(keyOf(line))));
      };
      button.addEventListener("click", () => {
        const key = keyOf(line);
        if (state.hidden.has(key)) state.hidden.delete(key); else state.hidden.add(key);
        paint(); redraw();
      });
      paint();
      host.append(button);
      return { line, value, paint };
    });
    return (u) => {
      const show = Report.units[panel.unit];
      for (const { line, value, paint } of made) {
        const at = lines.indexOf(line) + 1, mean = u.data[at];
        let row = u.cursor.idx === null || u.cursor.idx === undefined ? null : nearest(u, at, u.cursor.idx);
        if (row === null) { row = mean.length - 1; while (row > 0 && mean[row] == null) row -= 1; }
        const most = lines[at]?.role === "most" ? u.data[at + 1][row] : null, least = most === null ? null : u.data[at + 2][row];
        let text = mean[row] == null ? "" : show(most !== null && most === least ? most : mean[row]);
        if (ranges && text && most !== null && least !== null && most > least && u.cursor.idx != null) text += ` (${show(least)} to ${show(most)})`;
        value.textContent = text;
        paint();
      }
    };
  };
  const summary = (panel, data, lines) => {
    const at = lines.findIndex((line) => line.role === "mean") + 1, show = Report.units[panel.unit];
    const values = (data[at] ?? []).filter((value) => value != null);
    if (!values.length) return `${panel.title}: no values`;
    return `${panel.title}, ${lines[at - 1].trace.label}: from ${show(values[0])} to ${show(values[values.length - 1])}`;
  };
  Report.frame = (host, title, about = "") => {
    const head = create("div", { className: "head" }, create("h3", {}, title));
    if (about) head.append(create("p", { className: "about" }, about));
    const body = create("div"), box = create("section", { className: "panel" }, head, body);
    box.setAttribute("aria-label", title);
    body.setAttribute("role", "img");
    host.append(box);
    return { box, head, body };
  };
  const curvePanel = (host, panel) => {
    const state = (panel.state ??= {
      log: panel.scale === "log", fit: false,
      hidden: new Set(several ? runs.flatMap((run, number) => panel.traces.slice(1).filter((trace) => !trace.dots).map((trace) => `${number} ${trace.column}`)) : []),
    });
    const { lines, data } = Report.assemble(panel, state.log);
    if (!lines.length) return;
    const { head, body } = Report.frame(host, panel.title, panel.about);
    body.setAttribute("aria-label", summary(panel, data, lines));
    const chips = create("div", { className: "keys live" }), modes = create("div", { className: "modes" });
    head.append(chips, modes);
    let chart, refresh = () => {};
    const redraw = () => {
      lines.forEach((line, at) => chart.setSeries(at + 1, { show: !state.hidden.has(keyOf(line)) }, false));
      chart.redraw();
    };
    refresh = keys(chips, panel, lines, state, redraw);
    for (const [mode, title] of [["log", "logarithmic axis"], ["fit", "ignore extremes"]]) {
      const button = create("button", { type: "button", title }, mode);
      button.setAttribute("aria-pressed", String(state[mode]));
      button.addEventListener("click", () => { state[mode] = !state[mode]; Report.build(); });
      modes.append(button);
    }
    const bands = lines.flatMap((line, at) => (line.role === "most" ? [{ series: [at + 1, at + 2], fill: () => alpha(color(line, panel), 0.16) }] : []));
    chart = Report.plot(body, {
      height: narrow() ? 170 : 200,
      scales: { y: { distr: state.log ? 3 : 1, range: yRange(panel, state, lines) } },
      axes: [xAxis(true), yAxis(Report.units[panel.unit], () => state.log, panel.unit === "bytes" ? 1024 ** Math.floor(Math.log2(Math.max(1, ...runs.map((run) => run.kept.mean[panel.traces[0].column]?.at(-1) ?? 1))) / 10) : 1)],
      series: [{}, ...lines.map((line) => style(line, panel, state))],
      bands,
      hooks: { draw: [drawMarks], setCursor: [refresh], ready: [refresh] },
    }, data);
    Report.hover(chart, near(chart, 2));
  };
  // A ramp that never moves needs no panel.
  const constant = (panel) => {
    if (!panel.brief) return null;
    const texts = [];
    for (const run of runs)
      for (const trace of panel.traces) {
        const values = [run.kept, ...run.left].flatMap((curve) => [curve.mean, curve.least, curve.most]
          .flatMap((part) => part[trace.column] ?? [])).filter((value) => value !== null);
        if (values.some((value) => value !== values[0])) return null;
        if (values.length) texts.push(`${panel.traces.length > 1 ? `${trace.label} ` : ""}${Report.units[panel.unit](values[0])}`);
      }
    const different = new Set(texts);
    return texts.length ? `${panel.title.toLowerCase()} ${[...different].join(", ")}${panel.name === "shares" ? "" : ` ${panel.traces[0].label}`}` : "";
  };

  // ---------------------------------------------------------------- events above the curves
  const GROUPS = { start: "starts", end: "ends", change: "changes", alarm: "alarms", save: "saves", evaluation: "evaluations", note: "notes", progress: "progress" };
  const strip = (host) => {
    const groups = Object.keys(GROUPS).filter((group) => Report.events.some((event) => event.group === group && event.mark));
    if (!groups.length) return;
    for (const group of groups) Report.groups[group] ??= { hidden: group === "progress" };
    const visible = () => groups.filter((group) => !Report.groups[group].hidden);
    const { head, body } = Report.frame(host, "Events");
    body.setAttribute("aria-label", "Events over the run; the table at the end of the page lists them");
    const chips = create("div", { className: "keys" });
    head.append(chips);
    for (const group of groups) {
      const total = Report.events.filter((event) => event.group === group && event.mark).length;
      const chip = create("button", { type: "button", className: "key" }, `${GROUPS[group]} `, create("b", {}, String(total)));
      chip.setAttribute("aria-pressed", String(!Report.groups[group].hidden));
      chip.addEventListener("click", () => { Report.groups[group].hidden = !Report.groups[group].hidden; Report.build(); });
      chips.append(chip);
    }
    const rows = visible(), row = (event) => rows.length - rows.indexOf(event.group) - 0.5;
    const draw = (u) => {
      const { ctx } = u, ratio = uPlot.pxRatio;
      ctx.save();
      for (const event of Report.events.filter((each) => shown(each, 1) && rows.includes(each.group))) {
        const x = place(u, event), y = u.valToPos(row(event), "y", true);
        const until = event.until ? place(u, event, event.until) : event.open ? Report.range[1] : null;
        ctx.fillStyle = ctx.strokeStyle = css(BASE[event.level]);
        ctx.lineWidth = 3 * ratio;
        if (until !== null && x !== null && until > Report.range[0] && x < Report.range[1]) {
          ctx.globalAlpha = 0.45;
          ctx.beginPath();
          ctx.moveTo(u.valToPos(Math.max(x, Report.range[0]), "x", true), y);
          ctx.lineTo(u.valToPos(Math.min(until, Report.range[1]), "x", true), y);
          ctx.stroke();
          ctx.globalAlpha = 1;
        }
        if (!inView(x)) continue;
        glyph(ctx, event.level, u.valToPos(x, "x", true), y, 5 * ratio);
        ctx.fill();
      }
      ctx.restore();
    };
    const chart = Report.plot(body, {
      height: rows.length * 22 + 44,
      scales: { y: { range: () => [0, Math.max(1, rows.length)] } },
      axes: [xAxis(true), { ...yAxis((value) => GROUPS[rows[rows.length - Math.round(value + 0.5)]] ?? ""), splits: () => rows.map((_, at) => at + 0.5), grid: { show: false } }],
      series: [{}, { show: true, paths: () => null, points: { show: false } }],
      hooks: { draw: [draw] },
    }, [Report.extent(), [null, null]]);
    const find = (x, y) => {
      const at = chart.posToVal(y, "y");
      return Report.events.filter((event) => shown(event, 1) && rows.includes(event.group) && Math.abs(row(event) - at) < 0.5)
        .map((event) => {
          const from = chart.valToPos(place(chart, event) ?? NaN, "x"), to = event.until ? chart.valToPos(place(chart, event, event.until), "x") : from;
          return [x < from ? from - x : x > to ? x - to : 0, Math.abs(x - from), event];
        })
        .filter(([away]) => away <= 7).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, , event]) => event);
    };
    Report.hover(chart, (x, y) => find(x, y).map(Report.describe));
    chart.over.addEventListener("click", (click) => {
      const box = chart.over.getBoundingClientRect(), [event] = find(click.clientX - box.left, click.clientY - box.top);
      if (event) Report.reveal(event);
    });
  };

  // ---------------------------------------------------------------- checkpoints
  const SAVES = {
    verified: ["--ok", true, "verified"], written: ["--info", false, "written, not verified"], deleted: ["--c6", true, "deleted later, as configured"],
    left: ["--c6", false, "left behind"], damaged: ["--crit", true, "damaged"], lost: ["--crit", false, "lost"], failed: ["--crit", true, "failed"],
  };
  const saves = (host) => {
    const found = runs.flatMap((run) => run.saves.map((save) => ({ ...save, run })));
    if (!found.length) return;
    const { head, body } = Report.frame(host, "Checkpoints", "seconds each took");
    const states = Object.keys(SAVES).filter((state) => found.some((save) => save.state === state));
    const chips = create("div", { className: "keys" });
    for (const state of states) {
      const sign = create("span", {}, { verified: "●", written: "○", deleted: "·", left: "×", damaged: "▲", lost: "✕", failed: "▼" }[state]);
      sign.style.color = css(SAVES[state][0]);
      chips.append(create("span", { className: "key" }, sign, SAVES[state][2], create("b", {}, String(found.filter((save) => save.state === state).length))));
    }
    head.append(chips);
    body.setAttribute("aria-label", `Checkpoints: ${states.map((state) => `${found.filter((save) => save.state === state).length} ${SAVES[state][2]}`).join(", ")}`);
    const top = Math.max(...found.map((save) => save.seconds ?? 0), 1e-3) * 1.15;
    const y = (save) => save.seconds ?? top * 0.06;
    const draw = (u) => {
      const { ctx } = u, ratio = uPlot.pxRatio;
      ctx.save();
      for (const save of found) {
        const x = Report.onClock(save.run, save.at);
        if (!inView(x)) continue;
        const left = u.valToPos(x, "x", true), high = u.valToPos(y(save), "y", true), size = (save.state === "deleted" ? 2.2 : 4.5) * ratio;
        ctx.fillStyle = ctx.strokeStyle = css(several && save.state === "verified" ? `--c${runs.indexOf(save.run) % 8}` : SAVES[save.state][0]);
        ctx.lineWidth = 1.6 * ratio;
        ctx.beginPath();
        if (save.state === "left" || save.state === "lost") {
          ctx.moveTo(left - size, high - size); ctx.lineTo(left + size, high + size); ctx.moveTo(left + size, high - size); ctx.lineTo(left - size, high + size);
          ctx.stroke();
        } else if (save.state === "failed" || save.state === "damaged") {
          const way = save.state === "failed" ? -1 : 1;
          ctx.moveTo(left, high - way * size); ctx.lineTo(left + size, high + way * size); ctx.lineTo(left - size, high + way * size); ctx.fill();
        } else {
          ctx.arc(left, high, size, 0, 7);
          if (SAVES[save.state][1]) ctx.fill(); else ctx.stroke();
        }
      }
      ctx.restore();
    };
    const chart = Report.plot(body, {
      height: 120, scales: { y: { range: () => [0, top] } }, axes: [xAxis(true), yAxis(Report.format.span)],
      series: [{}, { paths: () => null, points: { show: false } }], hooks: { draw: [drawMarks, draw] },
    }, [Report.extent(), [null, null]]);
    Report.hover(chart, (left) => found.map((save) => [Math.abs(chart.valToPos(Report.onClock(save.run, save.at) ?? NaN, "x") - left), save])
      .filter(([away]) => away <= 6).sort((a, b) => a[0] - b[0])
      .map(([, save]) => [`${several ? `${save.run.name}: ` : ""}${SAVES[save.state][2]}`, `step ${Report.format.whole(save.at.step)}, ${Report.format.date(save.at.written)}: ${save.text}`]));
  };

  // ---------------------------------------------------------------- goodput
  Report.states = [
    ["kept", "useful steps", ["step_kept"]], ["slow", "slower than usual", ["step_slow", "warmup"]], ["data", "waiting for data", ["data_wait"]],
    ["save", "waiting for saves", ["ckpt_block"]], ["heldout", "held-out loss", ["heldout"]], ["skipped", "skipped steps", ["step_skipped"]],
    ["lost", "lost steps", ["lost"]], ["restart", "ending and starting", ["detect", "teardown", "launch", "load"]], ["queue", "queue", ["queued"]],
    ["unknown", "unexplained", ["idle_unknown"]],
  ];
  const goodput = (host, run) => {
    const band = run.bands.find((each) => each.edges[Report.clocks[Report.clock].column]);
    if (!band) return;
    const edges = Report.onClock(run, band.edges), bins = edges.length - 1;
    const groups = Report.states.filter(([, , names]) => names.some((name) => band.seconds[name]));
    const total = Array.from({ length: bins }, (_, bin) => Object.values(band.seconds).reduce((sum, column) => sum + (column[bin] ?? 0), 0));
    let below = new Array(bins).fill(0);
    const stacked = groups.map(([, , names]) => {
      below = below.map((sum, bin) => sum + names.reduce((part, name) => part + (band.seconds[name]?.[bin] ?? 0), 0));
      return [...below.map((sum, bin) => (total[bin] > 0 ? Math.min(1, sum / total[bin]) : null)), null];
    }).map((column) => { column[bins] = column[bins - 1]; return column; });
    const { head, body } = Report.frame(host, `Goodput${several ? ` of ${run.name}` : ""}`, `${Report.units.share(run.account.goodput)} in all`);
    const chips = create("div", { className: "keys" });
    const values = groups.map(([name, label]) => {
      const swatch = create("i"), value = create("b");
      swatch.style.borderTopColor = css(`--s-${name}`); swatch.style.borderTopWidth = "9px";
      chips.append(create("span", { className: "key" }, swatch, label, value));
      return value;
    });
    head.append(chips);
    body.setAttribute("aria-label", `Share of the time in each state; in all ${Report.units.share(run.account.goodput)} goodput`);
    const refresh = (u) => values.forEach((value, at) => {
      const row = u.cursor.idx;
      const share = row == null || stacked[at][row] === null ? null : stacked[at][row] - (at ? stacked[at - 1][row] : 0);
      value.textContent = share === null ? "" : Report.units.share(share);
    });
    // From the top down, so that every fill ends at the one below.
    const order = groups.map((_, at) => groups.length - 1 - at);
    Report.plot(body, {
      height: 130, scales: { y: { range: () => [0, 1] } },
      axes: [xAxis(true), yAxis(Report.units.share)],
      series: [{}, ...order.map((at) => ({
        stroke: () => css("--paper"), width: 0.4, fill: () => css(`--s-${groups[at][0]}`), paths: uPlot.paths.stepped({ align: 1 }), points: { show: false },
      }))],
      bands: order.slice(0, -1).map((_, at) => ({ series: [at + 1, at + 2] })),
      cursor: { points: { show: false } },
      hooks: { draw: [drawMarks], setCursor: [refresh] },
    }, [edges, ...order.map((at) => stacked[at])]);
  };

  // ---------------------------------------------------------------- evaluations
  const evaluation = (host, name, curves) => {
    const [task, metric] = name, tables = curves.map(({ run, curve }) => {
      const points = curve.scores.map((score) => [Report.onClock(run, score.at), score]).filter(([x]) => x !== null).sort((a, b) => a[0] - b[0]);
      const unique = points.filter(([x], at) => at === points.length - 1 || points[at + 1][0] !== x);
      return [unique.map(([x]) => x), unique.map(([, score]) => (score.left ? null : score.value))];
    });
    const all = curves.flatMap(({ run, curve }) => curve.scores.map((score) => ({ ...score, run })));
    const better = curves[0].curve.better, newest = curves.map(({ curve }) => curve.scores.filter((score) => !score.left).at(-1) ?? curve.scores.at(-1));
    const show = Report.units[""], first = newest[0];
    const interval = first.low === null ? "" : ` (${show(first.low)} to ${show(first.high)})`;
    const about = `${several ? "" : `${show(first.value)}${interval}`}${better ? `, ${better} is better` : ""}`.replace(/^, /, "");
    const { body } = Report.frame(host, `${task} ${metric}`, about);
    body.setAttribute("aria-label", `${task} ${metric}: ${about}`);
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const lows = all.map((score) => score.low ?? score.value), highs = all.map((score) => score.high ?? score.value);
    const [low, high] = [Math.min(...lows), Math.max(...highs)], pad = (high - low || Math.abs(high) || 1) * 0.08;
    const draw = (u) => {
      const { ctx } = u, ratio = uPlot.pxRatio;
      ctx.save();
      for (const score of all) {
        const x = Report.onClock(score.run, score.at);
        if (!inView(x)) continue;
        const left = u.valToPos(x, "x", true), to = (value) => u.valToPos(value, "y", true), name = `--c${runs.indexOf(score.run) % 8}`;
        ctx.strokeStyle = alpha(name, score.left ? 0.4 : 0.75); ctx.fillStyle = css(name); ctx.lineWidth = 1.2 * ratio;
        if (score.low !== null) {
          ctx.beginPath(); ctx.moveTo(left, to(score.low)); ctx.lineTo(left, to(score.high));
          for (const end of [score.low, score.high]) { ctx.moveTo(left - 3 * ratio, to(end)); ctx.lineTo(left + 3 * ratio, to(end)); }
          ctx.stroke();
        }
        ctx.beginPath(); ctx.arc(left, to(score.value), 3 * ratio, 0, 7);
        if (score.left) ctx.stroke(); else ctx.fill();
      }
      ctx.restore();
    };
    const chart = Report.plot(body, {
      height: 140, scales: { y: { range: () => [low - pad, high + pad] } }, axes: [xAxis(true), yAxis(show)],
      series: [{}, ...curves.map(({ run }) => ({ stroke: () => css(`--c${runs.indexOf(run) % 8}`), width: 1.3, spanGaps: true, points: { show: false } }))],
      hooks: { draw: [draw] },
    }, data);
    Report.hover(chart, (left) => all.map((score) => [Math.abs(chart.valToPos(Report.onClock(score.run, score.at) ?? NaN, "x") - left), score])
      .filter(([away]) => away <= 8).sort((a, b) => a[0] - b[0]).map(([, score]) => [
        `${several ? `${score.run.name}: ` : ""}${show(score.value)}`,
        `${score.low === null ? "" : `95% ${show(score.low)} to ${show(score.high)}, `}step ${Report.format.whole(score.at.step)}${score.documents ? `, ${score.documents} documents` : ""}${score.left ? ", left behind" : ""}`]));
  };
  const evaluations = (host) => {
    const table = new Map();
    for (const run of runs)
      for (const curve of run.evaluations.curves) {
        const key = JSON.stringify([curve.task, curve.metric]);
        table.set(key, [...(table.get(key) ?? []), { run, curve }]);
      }
    for (const [key, curves] of table) evaluation(host, JSON.parse(key), curves);
  };

  // ---------------------------------------------------------------- the page
  Report.build = () => {
    for (const chart of Report.charts.splice(0)) chart.destroy();
    Report.range ??= Report.extent();
    const host = document.getElementById("panels"), grid = document.querySelector("#evaluations .grid");
    const scroll = window.scrollY, height = document.body.offsetHeight;
    document.body.style.minHeight = `${height}px`; // so that rebuilding does not scroll
    host.replaceChildren();
    grid.replaceChildren();
    strip(host);
    const constants = [];
    for (const panel of panels) {
      const text = constant(panel);
      if (text === null) curvePanel(host, panel);
      else if (text) constants.push(text);
      if (panel.name === "seconds") for (const run of runs) goodput(host, run);
    }
    saves(host);
    if (constants.length) host.append(create("p", { className: "constants" }, `Constant: ${constants.join("; ")}.`));
    document.getElementById("evaluations").hidden = !runs.some((run) => run.evaluations.curves.length || run.evaluations.verdicts.length);
    evaluations(grid);
    document.body.style.minHeight = "";
    window.scrollTo(0, scroll);
  };
})();
