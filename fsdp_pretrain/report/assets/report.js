"use strict";
// Draws the figures of figures.py with plotly.js: clocks, one range for all, themes, log and fit, events in the table.
(async () => {
  const unpack = async (id) => {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const library = document.createElement("script");
  library.textContent = await unpack("library"); // its hash is in the page's policy
  document.head.append(library);
  const { begins, places, marks, figures } = JSON.parse(await unpack("data"));
  const root = document.documentElement, all = (selector) => [...document.querySelectorAll(selector)];
  const plots = all(".plot"), kept = places[0];
  const buttons = plots.map((plot) => [...plot.closest(".panel").querySelectorAll("button")]);
  const isOn = (at, name) => buttons[at].some((button) => button.value === name && button.getAttribute("aria-pressed") === "true");
  const count = (value) => value.toLocaleString("en-US", { notation: "compact", maximumSignificantDigits: 4 });

  // ---------------------------------------------------------------- clocks
  let clock = "step", before = null, range; // the theme before printing; in steps, ..., days to seconds, or milliseconds since 1970
  const bounds = (values) => values.reduce(([low, high], value) => (value === null ? [low, high] : [Math.min(low, value), Math.max(high, value)]), [Infinity, -Infinity]);
  const whole = places.filter((place) => place.whole);
  const longest = Math.max(...whole.map((place) => bounds(place.written)[1] - begins[place.run]));
  const [, unit, suffix] = [[345600, 86400, " d"], [7200, 3600, " h"], [120, 60, " min"], [-Infinity, 1, " s"]].find(([least]) => longest >= least);
  const column = (place) => {
    if (clock === "date") return place.written.map((value) => value && value * 1000);
    if (clock === "elapsed") return place.written.map((value) => value && (value - begins[place.run]) / unit);
    return place[clock];
  };
  const extent = () => {
    const [low, high] = bounds(whole.flatMap(column));
    if (!(high >= low)) return [0, 1];
    const from = clock !== "date" && low < high / 10 ? 0 : low;
    return high > from ? [from, high] : [from - 0.5, from + 0.5];
  };

  // ---------------------------------------------------------------- drawing
  const number = (value) => (typeof value === "string" ? Date.parse(`${value.replace(" ", "T")}Z`) : value); // dates of plotly
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const paint = (value) => {
    if (typeof value === "string") return value.startsWith("--") ? css(value) : value;
    if (!value || typeof value !== "object" || Array.isArray(value)) return value;
    return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, paint(each)]));
  };
  const traced = ({ place, rows, low, high, key, hidden, ...trace }) => {
    let x = column(places[place]);
    if (rows) x = rows.map((row) => (row === null ? null : x[row]));
    const found = { type: "scatter", x, ...paint(trace) };
    if (!low) return [found];
    found.customdata = low.map((value, at) => [value, high[at]]);
    found.hovertemplate = low.map((value, at) => (value < high[at] ? trace.hovertemplate : "%{y}"));
    // The shade between the extremes: a polygon for every part without a break.
    const shade = { x: [], y: [] };
    for (let from = 0, to = 0; to <= x.length; to += 1)
      if (to === x.length || low[to] === null) {
        for (let at = from; at < to; at += 1) { shade.x.push(x[at]); shade.y.push(high[at]); }
        for (let at = to - 1; at >= from; at -= 1) { shade.x.push(x[at]); shade.y.push(low[at]); }
        shade.x.push(null); shade.y.push(null);
        from = to + 1;
      }
    const band = { ...found, ...shade, mode: "lines", fill: "toself", fillcolor: found.line.color, opacity: 0.3, line: { width: 0.5, color: found.line.color }, hoverinfo: "skip", hovertemplate: undefined, customdata: undefined };
    return [band, found];
  };
  // The range of a y axis that shows what is in the range of x, and all of it or all but the extremes.
  const yRange = (at, traces) => {
    if (!figures[at].fit) return {};
    const isLog = isOn(at, "log"), isFit = isOn(at, "fit"), fromZero = figures[at].axis.rangemode && !isFit;
    const values = [], [first, last] = range.map(number);
    for (const { x, y, fill, yaxis } of traces)
      if (yaxis !== "y2" && !(fill && isFit))
        for (let row = 0; row < x.length; row += 1)
          if (x[row] >= first && x[row] <= last && y[row] !== null && !(isLog && y[row] <= 0)) values.push(y[row]);
    if (!values.length) return { type: "linear", range: [0, 1] };
    values.sort((a, b) => a - b);
    const edge = isFit ? 0.01 : 0, to = (share) => values[Math.round(share * (values.length - 1))];
    let [low, high] = [to(edge), to(1 - edge)];
    if (isLog) {
      [low, high] = [Math.log10(Math.max(low, high / 1e4)), Math.log10(high)];
      const pad = Math.max(0.02, (high - low) * 0.05);
      const digits = high - low < 0.7 ? [1, 1.5, 2, 3, 4, 5, 6, 8] : high - low < 2.5 ? [1, 2, 5] : [1], tickvals = [];
      for (let power = Math.floor(low - pad); power <= high + pad; power += 1) tickvals.push(...digits.map((digit) => digit * 10 ** power));
      return { type: "log", range: [low - pad, high + pad], tickmode: high - low < 0.25 ? "auto" : "array", tickvals };
    }
    if (fromZero) low = Math.min(0, low);
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    return { type: "linear", tickmode: "auto", range: [low === 0 && fromZero ? 0 : low - pad, high + pad] };
  };
  const xAxis = () => ({
    type: clock === "date" ? "date" : "linear", exponentformat: clock === "step" ? "none" : "B", separatethousands: true,
    ticksuffix: clock === "elapsed" ? suffix : "", hoverformat: { step: ",.0f", elapsed: ".4~r" }[clock],
  });
  const draw = (at) => {
    const figure = figures[at], color = css("--muted"), grid = css("--grid");
    const line = { color, gridcolor: grid, zerolinecolor: grid, linecolor: grid };
    const traces = figure.traces.filter(({ key }) => !key || isOn(at, key)).flatMap(traced), isStrip = figure.axis.type === "category";
    const layout = {
      width: before && (figure.scores ? 340 : 700), // of paper
      xaxis: { ...line, ...xAxis(), range: [...range] }, yaxis: { ...line, nticks: Math.ceil(figure.height / 40), ...figure.axis, ...yRange(at, traces), fixedrange: true },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      height: figure.height, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: "zoom",
      font: { family: "system-ui, sans-serif", size: 11, color: css("--ink") }, margin: { l: 68, r: 26, t: 4, b: clock === "date" ? 38 : 24 },
      hovermode: figure.fit || traces.some((trace) => trace.stackgroup) ? "x unified" : "closest", hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") }, align: "left", namelength: -1 },
      showlegend: false,
    };
    return Plotly.react(plots[at], isStrip || figure.scores ? traces : [...marks.flatMap(traced), ...traces], layout, { displayModeBar: false, responsive: true, doubleClick: false, showTips: false });
  };
  const drawAll = () => Promise.all(figures.map((_, at) => draw(at)));

  // ---------------------------------------------------------------- one range
  const zoom = (low, high) => {
    range = [low, high];
    return Promise.all(plots.map((plot, at) => {
      if (!plot.data) return null; // not drawn yet
      const change = Object.entries(yRange(at, plot.data)).map(([key, value]) => [`yaxis.${key}`, value]);
      return Plotly.relayout(plot, { "xaxis.range": [low, high], ...Object.fromEntries(change) });
    }));
  };
  const nearest = (value, values) => {
    const at = values.findIndex((each) => each >= value);
    return at < 0 ? values.length - 1 : at;
  };
  // Show the same part of the run on another clock.
  const choose = (name) => {
    const [first, last] = extent(), rows = range.map((value) => nearest(value, column(kept)));
    const isEdge = [range[0] <= first, range[1] >= last];
    clock = name;
    const every = extent(), x = column(kept);
    range = every.map((edge, at) => (isEdge[at] ? edge : x[rows[at]]));
    if (!(range[1] > range[0])) range = every;
    for (const button of all("#clocks button")) button.setAttribute("aria-pressed", String(button.value === clock));
    return drawAll();
  };
  // Where the pointer is, on every clock, and the events there.
  const where = document.getElementById("where");
  const tell = (x, points) => {
    if (!kept.step.length) return;
    const at = nearest(x, column(kept)), events = points.flatMap(({ data, pointNumber }) => data.told?.[pointNumber] ?? []);
    const place = `step ${kept.step[at].toLocaleString("en-US")} · ${count(kept.consumed[at])} samples · ${count(kept.trained[at])} tokens · ${new Date(kept.written[at] * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`;
    where.replaceChildren(...[place, ...new Set(events)].map((text) => Object.assign(document.createElement("p"), { textContent: text })));
  };

  // ---------------------------------------------------------------- what a person can do
  const theme = document.getElementById("theme"), dark = window.matchMedia("(prefers-color-scheme: dark)");
  const dress = (name) => { root.dataset.theme = name; theme.textContent = name === "dark" ? "light" : "dark"; };
  theme.addEventListener("click", () => { dress(theme.textContent); drawAll(); });
  dark.addEventListener("change", () => { dress(dark.matches ? "dark" : "light"); drawAll(); });
  window.addEventListener("beforeprint", () => { before = root.dataset.theme; dress("light"); drawAll(); });
  window.addEventListener("afterprint", () => { dress(before); before = null; drawAll(); });
  for (const button of all("#clocks button")) button.addEventListener("click", () => choose(button.value));
  const moves = { left: [1, -0.5], out: [2, 0], in: [0.5, 0], right: [1, 0.5], all: [Infinity, 0] };
  for (const button of all("#zoom button")) button.addEventListener("click", () => {
    const [factor, shift] = moves[button.value], [low, high] = range, [first, last] = extent();
    const width = Math.min((high - low) * factor, last - first), middle = (low + high) / 2 + (high - low) * shift;
    const from = Math.min(Math.max(first, middle - width / 2), last - width);
    zoom(from, from + width);
  });
  buttons.forEach((each, at) => each.forEach((button) => button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", String(!isOn(at, button.value)));
    draw(at);
  })));
  const form = document.getElementById("filter"), rows = all("#events tbody tr");
  const filter = () => {
    const kind = form.kind.value, text = form.text.value.toLowerCase();
    const fits = { marked: (row) => row.dataset.marked === "1", worse: (row) => row.dataset.severity > 0, all: () => true }[kind] ?? ((row) => row.dataset.group === kind);
    for (const row of rows) row.hidden = !(fits(row) && row.textContent.toLowerCase().includes(text));
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  // A step in the table zooms to a twentieth of the run around it.
  for (const row of rows) row.querySelector("button").addEventListener("click", () => {
    const [place, at] = row.dataset.place.split(" "), x = column(places[place])[at], [first, last] = extent();
    if (x === null) return;
    zoom(Math.max(first, x - (last - first) / 40), Math.min(last, x + (last - first) / 40));
    document.getElementById("panels").scrollIntoView();
  });

  // ---------------------------------------------------------------- the page
  dress(dark.matches ? "dark" : "light");
  range = extent();
  for (const at of figures.keys()) {
    await draw(at);
    await new Promise((go) => setTimeout(go)); // so that the first can be seen
  }
  plots.forEach((plot, at) => {
    const unified = (each) => each.layout.hovermode === "x unified";
    const others = plots.filter((other) => other !== plot && unified(plot) && unified(other));
    plot.on("plotly_relayout", (change) => {
      if (!("xaxis.range[0]" in change)) return;
      zoom(number(change["xaxis.range[0]"]), number(change["xaxis.range[1]"]));
    });
    plot.on("plotly_doubleclick", () => zoom(...extent()));
    plot.on("plotly_hover", ({ event, xvals, points }) => {
      if (!event?.target) return; // from below
      const x = number(xvals?.[0] ?? points[0].x);
      tell(x, points);
      for (const other of others) {
        const { top, bottom } = other.getBoundingClientRect();
        if (bottom > 0 && top < window.innerHeight) Plotly.Fx.hover(other, { xval: x });
      }
    });
    plot.on("plotly_unhover", () => { where.replaceChildren(); others.forEach((other) => Plotly.Fx.unhover(other)); });
    if (figures[at].axis.type === "category") plot.on("plotly_click", ({ points: [{ curveNumber, pointNumber }] }) => {
      const { place, rows: its } = figures[at].traces[curveNumber], row = rows.find((each) => each.dataset.place === `${place} ${its[pointNumber]}`);
      row.hidden = false;
      row.scrollIntoView({ block: "center" });
      row.querySelector("button").focus({ preventScroll: true });
    });
  });
  window.ready = true;
})();
