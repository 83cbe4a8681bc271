// llama.cpp's tokens a second, through node-llama-cpp: see engine_peers.py.  node engine_peers.mjs MODEL.gguf
import {getLlama} from "node-llama-cpp";

const [tokens, runs, threads] = [48, 3, 2];
const prompt =
    "The harbour of Lindholm was built in 1871 to ship timber from the sawmills along the river. " +
    "For forty years it was the busiest port on that coast:";
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads, logLevel: "error"});
const model = await llama.loadModel({modelPath: process.argv[2]});
const context = await model.createContext({contextSize: 512, threads, batchSize: 64});
const sequence = context.getSequence();
for (let run = 0; run < runs; run++) {
    await sequence.clearHistory();
    const text = [];
    let start = 0;
    for await (const token of sequence.evaluate(model.tokenize(prompt), {temperature: 0})) {
        if (text.length === 0) start = performance.now(); // behind the prefill
        text.push(token);
        if (text.length > tokens) break;
    }
    const rate = (1000 * tokens) / (performance.now() - start);
    console.log(`llama.cpp, ${context.currentThreads} threads: ${rate.toFixed(1)} tokens/s (${JSON.stringify(model.detokenize(text).slice(0, 40))})`);
}
process.exit(0);
