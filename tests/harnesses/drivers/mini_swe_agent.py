"""mini-swe-agent with its own configuration, over chat completions and Responses."""

import yaml
from _task import KEY, MODEL, PROMPT, URL, run
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_response_model import LitellmResponseModel

CONFIG = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())


def talk(model_class):
    where = {**CONFIG["model"].pop("model_kwargs"), "api_base": URL, "api_key": KEY}
    model = model_class(
        model_name=f"openai/{MODEL}", model_kwargs=where, cost_tracking="ignore_errors", **CONFIG["model"]
    )
    options = {name: CONFIG["agent"][name] for name in ("system_template", "instance_template")}
    return DefaultAgent(model, LocalEnvironment(**CONFIG["environment"]), **options).run(PROMPT)["submission"].strip()


run({"chat": lambda: talk(LitellmModel), "responses": lambda: talk(LitellmResponseModel)})
