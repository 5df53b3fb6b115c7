"""Reading `GET /metrics` in tests."""

from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

Samples = Mapping[str, float]


def samples_of(text: str) -> dict[str, float]:
    """`name{label="value",...}`, labels in alphabetical order -> value; `name` alone where there are no labels."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


async def scrape(client: httpx.AsyncClient) -> dict[str, float]:
    response = await client.get("/metrics")
    assert response.status_code == 200
    return samples_of(response.text)


def nonzero(samples: Samples, name: str) -> dict[str, float]:
    """The samples of one series that are not 0, without its name: `{code="ok"}` -> 2."""
    return {key.removeprefix(name): value for key, value in samples.items() if key.partition("{")[0] == name and value}
