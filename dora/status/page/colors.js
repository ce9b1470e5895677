// The colors of versions. Any two of PALETTE differ for everyone, the color-blind included (tests/status/test_page.py);
// where more than eight versions may be alive, every second eight are striped, so that 16 in a row can be told apart.

export const PALETTE = ["#3b2f9e", "#d55e00", "#88ccee", "#f0d442", "#9a6fd0", "#0b5f4a", "#b5d99c", "#cc79a7"];

export const color = (version) => PALETTE[version % PALETTE.length];

let needsStripes = false;

/** Set how many versions in a row must differ: K + 2. */
export function setNeighbors(count) {
  needsStripes = count > PALETTE.length;
}

export const isStriped = (version) => needsStripes && version % (2 * PALETTE.length) >= PALETTE.length;

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

/** Black or white, whichever can be read on a color. */
export function onColor(hex) {
  const [red, green, blue] = rgb(hex).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
}

/** A mixture: `share` of the first color. */
export function mix(hex, other, share) {
  const b = rgb(other);
  return `#${rgb(hex).map((c, i) => Math.round(share * c + (1 - share) * b[i]).toString(16).padStart(2, "0")).join("")}`;
}

/** A color as a pixel of an ImageData, in the byte order of today's machines. */
export function pixel(hex) {
  const [red, green, blue] = rgb(hex);
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/** The colors of the page, light or dark, as `#rrggbb`. */
export function theme() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => {
    const hex = style.getPropertyValue(`--${name}`).trim();
    return hex.length === 4 ? `#${[...hex.slice(1)].map((c) => c + c).join("")}` : hex;
  };
  return {
    panel: get("panel"), ink: get("ink"), quiet: get("quiet"), line: get("line"), faint: get("faint"), wrong: get("wrong"),
    series: [0, 1, 2, 3, 4, 5].map((i) => get(`s${i}`)),
  };
}
