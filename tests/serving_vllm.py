"""Runs inside vLLM's own environment: greedy tokens of one checkpoint, a list a prompt, as JSON on the last line.

python serving_vllm.py CHECKPOINT '[[token ids], ...]' NEW_TOKENS
"""

import json
import sys

from vllm import LLM, SamplingParams


def main() -> None:
    path, prompts, new_tokens = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    model = LLM(path, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=256)
    options = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    answers = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], options)
    print(json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))


if __name__ == "__main__":
    main()
