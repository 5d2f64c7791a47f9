// What is in view, as the hash of the address: "#view=0,5,0,323&pins=activation_2&find=norm".

function readHash() {
  const found = {};
  for (const part of location.hash.slice(1).split("&")) {
    const at = part.indexOf("=");
    if (at <= 0) continue;
    try {
      found[part.slice(0, at)] = decodeURIComponent(part.slice(at + 1));
    } catch {
      /* not ours */
    }
  }
  return found;
}

// "No module" is a module too, whose name is empty.
const moduleText = module => (module === "" ? "(none)" : module);
const moduleOf = text => (text === "(none)" ? "" : text);

// Lists are names joined by commas, in which commas are escaped once more.
const joined = names => names.map(name => encodeURIComponent(name)).join(",");
const parted = text =>
  text.split(",").map(name => {
    try {
      return decodeURIComponent(name);
    } catch {
      return name;
    }
  });

let hashTimer = 0;
function writeHash(state) {
  clearTimeout(hashTimer);
  hashTimer = setTimeout(() => {
    // browsers limit how often the address may change
    const text = Object.entries(state())
      .filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([key, value]) => `${key}=${encodeURIComponent(value)}`)
      .join("&");
    if (text !== location.hash.slice(1))
      history.replaceState(null, "", text ? "#" + text : location.pathname + location.search);
  }, 150);
}
