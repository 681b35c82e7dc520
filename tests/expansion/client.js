// A client that nobody here wrote: Beam's TypeScript SDK. `node client.js ADDRESS` expands a
// transform by URN and by class name, and prints what came back as JSON.
const beam = require("apache-beam");
const { rawExternalTransform } = require("apache-beam/transforms/external");
const { withRowCoder } = require("apache-beam/transforms/internal");
const { Pipeline } = require("apache-beam/internal/pipeline");

const address = process.argv[2];
const config = { model: "m", prompt: "{text}", sampling: { max_tokens: 4 } };

async function main() {
  const pipeline = new Pipeline();
  const rows = new beam.Root(pipeline)
    .apply(beam.create([{ text: "a" }, { text: "b" }]))
    .apply(withRowCoder({ text: "string" }));
  const asked = [
    ["beam:schematransform:beam_llm:vllm_completions:v1", config],
    [
      "beam:transforms:python:fully_qualified_named",
      { constructor: "beam_llm.VLLMCompletions", kwargs: config },
    ],
  ];
  const coders = [];
  for (const [urn, payload] of asked) {
    const answered = await rows.applyAsync(rawExternalTransform(urn, payload, address));
    const components = pipeline.getProto().components;
    const { coderId } = components.pcollections[answered.getId()];
    coders.push(components.coders[coderId].spec.urn);
  }
  const steps = Object.values(pipeline.getProto().components.transforms);
  const annotated = steps.filter((step) => step.annotations?.model_identifier);
  console.log(JSON.stringify({ coders, annotated: annotated.length }));
}

main().catch((error) => {
  console.error(String(error));
  process.exitCode = 1;
});
