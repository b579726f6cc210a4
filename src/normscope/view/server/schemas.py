"""Requests and responses of the API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt

TEXT = 20_000  # maximum characters of a text
GENERATED = 256  # maximum generated tokens
IMAGE = 12 * 2**20  # maximum characters of a base64-encoded picture
WAIT = 60.0  # maximum seconds that a request waits

LOGIT = 1000  # maximum characters of a class or token

Kind = Literal["encoder", "causal", "encoder-decoder", "vision"]
Targets = Literal["none", "classes", "tokens"]
State = Literal["running", "done", "failed", "cancelled"]
Text = Annotated[str, Field(max_length=TEXT)]


class ModelInfo(BaseModel):
    """A model of this server."""

    name: str
    family: str
    kind: Kind
    layers: int
    heads: int
    scopes: list[str] = Field(
        description="for an encoder-decoder, the decoder's scopes, then those that only the encoder has"
    )
    max_tokens: int | None = Field(description="the longest input; null if the model has no limit")
    targets: Targets = Field(description="possible flow targets: logits of classes, of tokens, or none")
    classes: list[str] = Field(description="the names of the classes, if targets are classes")
    positions: bool = Field(description="true if there are logits at every token, so that a flow takes a position")


Logit = Annotated[str, Field(max_length=LOGIT)] | StrictInt


class FlowRequest(BaseModel):
    """A flow through the whole model to a logit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: Logit = Field(description="a class or token, by name or index, or `top` for the largest logit")
    against: Logit | None = Field(None, description="a second target, whose logit is subtracted")
    position: StrictInt | None = Field(None, description="the token at which the logit is read, counted from 0")
    method: str = Field("exact", max_length=100, description="a method of `Analyzer.flow`")


class AnalysisRequest(BaseModel):
    """An analysis to run. Equal requests share one analysis."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(max_length=1000, description="a name from /api/models")
    text: Text = ""
    second: Text | None = Field(None, description="the second text of a pair")
    target: Text | None = Field(None, description="the target text of an encoder-decoder (default: generated)")
    generate: int | None = Field(None, ge=1, le=GENERATED, description="number of tokens to generate and analyse too")
    image: Annotated[str, Field(max_length=IMAGE)] | None = Field(
        None, description="a base64-encoded PNG, JPEG, WebP, GIF or BMP file, for vision models"
    )
    heads: bool = Field(False, description="also compute the maps of every attention head")
    flow: FlowRequest | None = Field(
        None, description="also compute the scores of the tokens for a logit, in the header"
    )


class ContrastRequest(BaseModel):
    """Another token in the place of one token of an answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    position: StrictInt = Field(ge=1, le=10**6, description="of the token of the answer, counted from 0 in the text")
    token: Annotated[str, Field(max_length=LOGIT)] = Field(description="the other token, as in `alternatives`")


class ExplanationRequest(BaseModel):
    """An answer to explain, token by token. Equal requests share one explanation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(max_length=1000, description="a name from /api/models")
    text: Text
    generate: int | None = Field(None, ge=1, le=GENERATED, description="explain this number of generated tokens")
    answer: Text | None = Field(None, description="explain this answer instead")
    contrast: ContrastRequest | None = Field(
        None, description="explain one token of the answer against another token, not all against their runners-up"
    )


class Status(BaseModel):
    """The state of an analysis."""

    id: str
    state: State
    progress: float = Field(ge=0, le=1)
    error: str | None = Field(None, description="why it failed")
    layers: int = Field(0, description="number of layers whose cells are available")


class Started(Status):
    """The response to a request for an analysis."""

    header: dict[str, Any] | None = Field(
        None, description="the header if the analysis is done; with `first`, possibly that of its first layers"
    )


class StartedExplanation(Status):
    """The response to a request for an explanation."""

    explanation: dict[str, Any] | None = Field(None, description="the explanation, once it is done")


class ErrorMessage(BaseModel):
    """Why a request was refused."""

    error: str
