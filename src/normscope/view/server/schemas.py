"""What the API takes and gives."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt

TEXT = 20_000  # characters of a text
GENERATED = 256  # tokens of the model's own
IMAGE = 12 * 2**20  # characters of a picture in base64
WAIT = 60.0  # seconds that a request waits at the most

LOGIT = 1000  # characters of a class or token

Kind = Literal["encoder", "causal", "encoder-decoder", "vision"]
Targets = Literal["none", "classes", "tokens"]
State = Literal["running", "done", "failed", "cancelled"]
Text = Annotated[str, Field(max_length=TEXT)]


class ModelInfo(BaseModel):
    """A model that was chosen when the server was started."""

    name: str
    family: str
    kind: Kind
    layers: int
    heads: int
    scopes: list[str] = Field(description="of an encoder-decoder those of the decoder, then those of the encoder alone")
    max_tokens: int | None = Field(description="the longest input; null: no limit of the model's own")
    targets: Targets = Field(description="what a flow can lead to: the logit of a class, of a token, or nothing")
    classes: list[str] = Field(description="the names of the classes, where targets are classes")
    positions: bool = Field(description="whether there is a logit at every token, so that a position says which")


Logit = Annotated[str, Field(max_length=LOGIT)] | StrictInt


class FlowRequest(BaseModel):
    """The logit that the whole model is to be followed to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: Logit = Field(description="a class or token, by name or index, or `top`: the largest logit")
    against: Logit | None = Field(None, description="the same, to be subtracted: a difference of two logits")
    position: StrictInt | None = Field(None, description="the token that the logit is read at, counted from 0")
    method: str = Field("exact", max_length=100, description="one of the methods of `Analyzer.flow`")


class AnalysisRequest(BaseModel):
    """What is to be analysed. The same request is the same analysis."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(max_length=1000, description="one of the names that /api/models lists")
    text: Text = ""
    second: Text | None = Field(None, description="the second text of a pair")
    target: Text | None = Field(None, description="what an encoder-decoder is to write; null: what it writes itself")
    generate: int | None = Field(None, ge=1, le=GENERATED, description="go on with tokens of the model's own")
    image: Annotated[str, Field(max_length=IMAGE)] | None = Field(
        None, description="a PNG, JPEG, WebP, GIF or BMP file in base64, for a vision model"
    )
    heads: bool = Field(False, description="also the maps of every attention head")
    flow: FlowRequest | None = Field(None, description="also the scores of the tokens for a logit, in the header")


class Status(BaseModel):
    """How far an analysis is."""

    id: str
    state: State
    progress: float = Field(ge=0, le=1)
    error: str | None = Field(None, description="why it failed")


class Started(Status):
    """The answer to a request for an analysis."""

    header: dict[str, Any] | None = Field(
        None, description="the header, where the analysis is done already; with `first` perhaps that of the first layer"
    )


class Refusal(BaseModel):
    """Why a request was refused."""

    error: str
