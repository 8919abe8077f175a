"use strict";
// The data of the page: decoding, clocks, formats, and tables that uPlot can draw. See fsdp_pretrain/report.
const Report = { data: JSON.parse(document.getElementById("data").textContent), clock: "step", charts: [], groups: {} };

(() => {
  const decode = (packed) => {
    const bytes = Uint8Array.from(atob(packed.f4 ?? packed.f8), (character) => character.charCodeAt(0));
    const values = packed.f4 === undefined ? new Float64Array(bytes.buffer) : new Float32Array(bytes.buffer);
    return Array.from(values, (value) => (Number.isFinite(value) ? value : null));
  };
  const decodeAll = (table) => Object.fromEntries(Object.entries(table).map(([name, packed]) => [name, decode(packed)]));

  // A curve with single steps, which are kept around marks, combined into buckets as wide as the others: for a view in
  // which there are more points than pixels.
  const coarsen = (curve) => {
    const { step } = curve.clocks, gaps = step.slice(1).map((each, row) => each - step[row]);
    const wide = gaps.filter((gap) => gap > 1).sort((a, b) => a - b), width = wide[wide.length >> 1];
    if (wide.length * 3 < gaps.length) return curve; // hardly anything was combined
    const starts = [], breaks = [], cuts = new Set(curve.breaks);
    for (let row = 0; row < step.length; row += 1) {
      if (cuts.has(row)) breaks.push(starts.length);
      if (row === 0 || cuts.has(row) || gaps[row - 1] > 1 || row - starts.at(-1) >= width) starts.push(row);
    }
    const combine = (columns, act) => Object.fromEntries(Object.entries(columns).map(([name, column]) => [
      name, starts.map((start, at) => {
        const found = column.slice(start, starts[at + 1]).filter((value) => value !== null);
        return found.length ? act(found) : null;
      }),
    ]));
    return {
      clocks: combine(curve.clocks, (values) => values.at(-1)), breaks,
      mean: combine(curve.mean, (values) => values.reduce((sum, value) => sum + value, 0) / values.length),
      least: combine(curve.least, (values) => Math.min(...values)), most: combine(curve.most, (values) => Math.max(...values)),
    };
  };

  for (const run of Report.data.runs) {
    for (const curve of [run.kept, ...run.left])
      for (const part of ["clocks", "mean", "least", "most"]) curve[part] = decodeAll(curve[part]);
    run.coarse = { kept: coarsen(run.kept), left: run.left.map(coarsen) };
    for (const band of run.bands) for (const part of ["edges", "seconds"]) band[part] = decodeAll(band[part]);
  }

  // ---------------------------------------------------------------- formats
  const digits = (value, count) => (value === 0 ? "0" : Number(value.toPrecision(count)).toString());
  const scaled = (value, base, suffixes) => {
    let power = 0;
    while (Math.abs(value) >= base && power < suffixes.length - 1) { value /= base; power += 1; }
    return digits(value, 4) + suffixes[power];
  };
  const count = (value) => (Math.abs(value) < 1e5 && Number.isInteger(value) ? value.toLocaleString("en-US") : scaled(value, 1000, ["", "K", "M", "B", "T"]));
  const span = (seconds) => {
    const size = Math.abs(seconds);
    if (size < 1e-3) return `${digits(seconds * 1e6, 3)}us`;
    if (size < 1) return `${digits(seconds * 1e3, 3)}ms`;
    if (size < 60) return `${digits(seconds, 3)}s`;
    const whole = Math.round(size), two = (number) => String(number).padStart(2, "0");
    const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor((whole % 86400) / 3600), Math.floor((whole % 3600) / 60)];
    if (days) return `${days}d${two(hours)}h`;
    return hours ? `${hours}h${two(minutes)}m` : `${minutes}m${two(whole % 60)}s`;
  };
  const date = (seconds) => (seconds === null ? "" : new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " "));
  Report.units = {
    "": (value) => (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5 ? digits(value, 5) : value === 0 ? "0" : value.toExponential(2)),
    count,
    seconds: span,
    bytes: (value) => scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]),
    share: (value) => `${digits(value * 100, 3)}%`,
  };
  Report.format = { count, span, date, whole: (value) => Math.round(value).toLocaleString("en-US") };

  // ---------------------------------------------------------------- clocks
  Report.clocks = {
    step: { label: "Steps", column: "step", show: (value) => Report.format.whole(value) },
    consumed: { label: "Samples", column: "consumed", show: count },
    trained: { label: "Tokens", column: "trained", show: count },
    elapsed: { label: "Elapsed", column: "written", show: span },
    written: { label: "Date", column: "written", show: date },
  };
  Report.onClock = (run, values, clock = Report.clock) => {
    const column = values[Report.clocks[clock].column];
    const moved = (value) => (value === null || value === undefined ? null : value - run.begin);
    if (clock !== "elapsed") return column;
    return Array.isArray(column) ? column.map(moved) : moved(column);
  };
  const onTime = () => Report.clocks[Report.clock].column === "written";

  // Whether single steps can be told apart in a range.
  Report.isFine = ([low, high]) => Report.data.runs.every((run) => {
    const x = Report.onClock(run, run.kept.clocks);
    return x.filter((value) => value >= low && value <= high).length < 1200;
  });

  // Bounds of everything that was trained, on the chosen clock.
  Report.extent = () => {
    let [low, high] = [Infinity, -Infinity];
    for (const run of Report.data.runs) {
      for (const curve of [run.kept, ...run.left]) {
        const x = Report.onClock(run, curve.clocks);
        if (x.length) { low = Math.min(low, x[0]); high = Math.max(high, x[x.length - 1]); }
      }
      if (onTime()) {
        const edges = Report.onClock(run, run.bands[0].edges);
        low = Math.min(low, edges[0]); high = Math.max(high, edges[edges.length - 1]);
      }
    }
    if (!Number.isFinite(low)) return [0, 1];
    if (!onTime() && low < high / 10) low = 0;
    return high > low ? [low, high] : [low - 0.5, low + 0.5];
  };

  // A position of the first run's kept line on another clock.
  const convert = (value, from, to) => {
    const run = Report.data.runs[0], x = Report.onClock(run, run.kept.clocks, from), y = Report.onClock(run, run.kept.clocks, to);
    const row = x.findIndex((each) => each >= value);
    return y[row < 0 ? y.length - 1 : row];
  };
  // Show the same part of the run on another clock.
  Report.choose = (clock) => {
    const before = Report.clock, [first, last] = Report.extent(), [low, high] = Report.range;
    Report.clock = clock;
    const every = Report.extent(), from = low <= first ? every[0] : convert(low, before, clock), to = high >= last ? every[1] : convert(high, before, clock);
    Report.range = to > from ? [from, to] : every;
  };

  // ---------------------------------------------------------------- tables
  // [x, column, ...] of a curve, rising in x, with a row of nulls where the line was interrupted.
  const tabulate = (run, curve, columns, isKept) => {
    const x = Report.onClock(run, curve.clocks), nudge = onTime() ? 1e-3 : 0;
    const cuts = new Set(isKept && !onTime() ? [] : curve.breaks);
    const table = [[], ...columns.map(() => [])];
    let last = -Infinity;
    for (let row = 0; row < x.length; row += 1) {
      let here = x[row] ?? last;
      if (here <= last) here = last + (nudge || 1e-6);
      if (cuts.has(row) && row) {
        table[0].push((last + here) / 2);
        for (let at = 1; at < table.length; at += 1) table[at].push(null);
      }
      table[0].push(here);
      columns.forEach((column, at) => table[at + 1].push(column ? column[row] : null));
      last = here;
    }
    return table;
  };

  // The lines of a panel: {run, trace, role: mean | least | most | left, pair}, and uPlot's aligned data.
  Report.assemble = (panel, log) => {
    const tables = [], lines = [];
    for (const run of Report.data.runs) {
      const { kept, left: others } = Report.fine ? run : run.coarse;
      const traces = panel.traces.filter((trace) => kept.mean[trace.column]);
      const columns = [];
      for (const trace of traces) {
        lines.push({ run, trace, role: "mean" });
        columns.push(kept.mean[trace.column]);
        if (kept.least[trace.column] && !trace.dots) {
          lines.push({ run, trace, role: "most" }, { run, trace, role: "least" });
          columns.push(kept.most[trace.column], kept.least[trace.column]);
        }
      }
      if (columns.length) tables.push(tabulate(run, kept, columns, true));
      const dim = panel.unit === "seconds" ? traces.slice(0, 1) : traces.filter((trace) => !trace.dots);
      for (const curve of others) {
        const left = [];
        for (const trace of dim)
          for (const part of ["most", "mean"]) {
            if (!curve[part][trace.column] || (part === "mean" && curve.most[trace.column])) continue;
            lines.push({ run, trace, role: "left" });
            left.push(curve[part][trace.column]);
          }
        if (left.length) tables.push(tabulate(run, curve, left, false));
      }
    }
    if (log) for (const table of tables) for (const column of table.slice(1))
      column.forEach((value, row) => { if (value !== null && value <= 0) column[row] = null; });
    const data = tables.length > 1 ? uPlot.join(tables, tables.map((table) => table.map(() => 2))) : tables[0] ?? [[]];
    return { lines, data };
  };
})();
