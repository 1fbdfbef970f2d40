// Reads what packed.py writes: facts, and arrays that lie as the processor wants them.
"use strict";
const packed = (() => {
  const TYPES = { uint8: Uint8Array, int16: Int16Array, int32: Int32Array, float32: Float32Array };
  const read = (buffer) => {
    const length = new DataView(buffer).getUint32(0, true), begin = 4 + length;
    const facts = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    for (const [name, [type, at, count]] of Object.entries(facts.arrays)) facts[name] = new TYPES[type](buffer, begin + at, count);
    return facts;
  };
  const load = async (address) => {
    const answer = await fetch(address);
    if (!answer.ok) throw new Error(`${answer.status}: ${(await answer.text()).slice(0, 200)}`);
    return read(await answer.arrayBuffer());
  };
  return { load, read };
})();
