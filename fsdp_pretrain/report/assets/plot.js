"use strict";
// What all panels share: colours, axes, one range, the cursor, marks.
(() => {
  const { runs } = Report.data, several = runs.length > 1;
  const AXIS = 68, BASE = { info: "--info", warn: "--warn", crit: "--crit" };
  const SEVERITIES = ["info", "warn", "crit"];
  // The style sheet's colours, #rrggbb, of the theme that is on.
  const known = {};
  const css = (name) => {
    const all = (known[document.documentElement.dataset.theme] ??= {});
    return (all[name] ??= getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  };
  const alpha = (name, share) => css(name) + Math.round(share * 255).toString(16).padStart(2, "0");
  const create = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };

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
      if (!onTime) return ticks(low, high, most).filter((value) => Number.isInteger(value)); // all are counts
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
    if (Report.isFine(Report.range) !== Report.fine) return Report.build();
    moving = true;
    for (const chart of Report.charts) chart.setScale("x", { min: low, max: high });
    moving = false;
    return undefined;
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

  // ---------------------------------------------------------------- a panel
  Report.frame = (host, title, about = "") => {
    const head = create("div", { className: "head" }, create("h3", {}, title));
    if (about) head.append(create("p", { className: "about" }, about));
    const body = create("div"), box = create("section", { className: "panel" }, head, body);
    box.setAttribute("aria-label", title);
    body.setAttribute("role", "img");
    host.append(box);
    return { box, head, body };
  };

  const narrow = () => window.innerWidth < 640;
  Object.assign(Report, { create, css, alpha, narrow, xAxis, yAxis, nearest, shown, place, inView, drawMarks, glyph, near, BASE });
})();
