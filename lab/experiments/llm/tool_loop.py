# SPDX-License-Identifier: Apache-2.0
"""A tool loop on verl 0.9's agent loop, with or without a common mistake.

The model is stopped at its first `=`, as by a `stop` string. A calculator answers, and the model continues. The chat
template requires a closed turn, so the loop appends `<|im_end|>`, a token that the policy did not sample.

Loaded by `actor_rollout_ref.model.external_lib`; `rollout.agent.default_agent_loop` chooses one of the two.
"""

import re
from typing import Any
from uuid import uuid4

from lab.experiments.verl09 import rollout
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

__all__ = ["Calculator", "MaskedCalculator", "rollout"]

SUM = re.compile(r"(\d+) *([+*-]) *(\d+) *=")
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
ANSWER = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def calculated(text: str) -> str:
    """Return the calculator's answer to the text before an `=`.

    >>> calculated("17 + 4 ="), calculated("I think that =")
    ('21', 'I cannot compute that.')
    """
    found = SUM.findall(text)
    if not found:
        return "I cannot compute that."
    left, sign, right = found[-1]
    return str(OPERATIONS[sign](int(left), int(right)))


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Return 1 if the last number is the answer, else 0.

    >>> score("", "17 + 4 = 21", "21"), score("", "what?", "21")
    (1.0, 0.0)
    """
    return float(re.findall(r"\d+", solution_str)[-1:] == [ground_truth])


@register("calculator")
class Calculator(AgentLoopBase):
    """Two turns with a calculator's answer in between, and the mistake: the appended end is in the loss."""

    is_masked = False
    """Whether the appended end of the first turn is masked in the loss, as the calculator's answer is."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Generate one response: the first turn, its end, the calculator's answer, the second turn."""
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        first = await self.generate(prompt, sampling_params)
        length = self.length_of_call(first.token_ids)
        response, log_probs = first.token_ids[:length], first.log_probs[:length]
        mask = [1] * length
        # tokens that the policy did not sample have the log-prob 0, as in verl's own tool loop
        answer = ANSWER.format(calculated(self.tokenizer.decode(response)))
        appended = [self.end, *self.tokenizer.encode(answer, add_special_tokens=False)]
        mask += [int(not self.is_masked)] + [0] * (len(appended) - 1)
        second = await self.generate(prompt + response + appended, sampling_params)
        response = response + appended + second.token_ids
        log_probs = log_probs + [0.0] * len(appended) + second.log_probs
        mask += [1] * len(second.token_ids)
        most = self.rollout_config.response_length
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=response[:most],
            response_mask=mask[:most],
            response_logprobs=log_probs[:most],
            num_turns=4,
            metrics={},
            extra_fields={**second.extra_fields, "turn_scores": [], "tool_rewards": []},
        )

    async def generate(self, prompt: list[int], sampling_params: dict[str, Any]) -> Any:
        """Return the engine's answer to these tokens."""
        return await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=prompt, sampling_params=sampling_params
        )

    def length_of_call(self, tokens: list[int]) -> int:
        """Return the number of tokens up to the first `=`, or of all but the end if there is none."""
        for length in range(1, len(tokens) + 1):
            if "=" in self.tokenizer.decode(tokens[:length]):
                return length
        return len(tokens) - (tokens[-1] == self.end)


@register("calculator-masked")
class MaskedCalculator(Calculator):
    """The loop without the mistake."""

    is_masked = True
