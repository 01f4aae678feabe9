"""A memory in your own transformers code: an unmodified model, a batch of two questions, one shared memory.

python examples/own_transformers_code.py handbook.ttmem
"""

import inspect
import sys

import torch

import ttmem

memory = ttmem.Memory.load(sys.argv[1])
model = ttmem.load_model()
memory.check_model(model)
network, tokenizer = model.network, model.tokenizer  # any AutoModelForCausalLM and its tokenizer

tokenizer.padding_side = "left"
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
questions = ["What is the name of the supply boat?", "Where is smoking allowed?"]
prompts = [f"\n\nQuestion: {question}\nAnswer:" for question in questions]
batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(network.device)

keyword = "cache" if "cache" in inspect.signature(network.forward).parameters else "past_key_values"
with torch.inference_mode():
    output = network.generate(**memory.inputs(batch), **{keyword: memory.cache()}, max_new_tokens=16, do_sample=False)
for question, ids in zip(questions, output[:, batch["input_ids"].shape[1] :], strict=True):
    print(question, "->", tokenizer.decode(ids, skip_special_tokens=True).strip().partition("\n")[0])
