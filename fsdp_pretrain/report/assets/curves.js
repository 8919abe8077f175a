"use strict";
// The panels of curves, each with its legend.
(() => {
  const { runs } = Report.data, several = runs.length > 1;
  const { create, css, alpha, narrow, xAxis, yAxis, nearest, drawMarks, near } = Report;
  const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [4, 6], [1, 5], [12, 4]];

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

  Object.assign(Report, { curvePanel, constant });
})();
