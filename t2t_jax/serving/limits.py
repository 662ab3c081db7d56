"""What one client, or all together, may ask of the server."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of time, memory and compilation; docs/serving.md explains them. Times are in seconds."""

    # Of one request.
    body_bytes: int = 1 << 16
    sentences: int = 32
    subwords: int = 256  # of a sentence, with EOS
    attention_subwords: int = 128  # of either side of a pair whose attention is shown
    beam_size: int = 32  # more where the run's own is larger, as with the next
    max_extra_length: int = 512
    # beam_size × (subwords + max_extra_length), summed over the sentences: base on two cores takes a minute for these.
    hypothesis_subwords: int = 1 << 16

    # Of all requests.
    connections: int = 512
    waiting_sentences: int = 448  # with the batch at work fewer than connections: there is one for /health
    # Of several requests, translated together; the server is warm when it has compiled for each number up to this. One
    # request may have more: on two cores, to compile for those too would make the warm-up of a quickstart 36% longer.
    batch_sentences: int = 16
    attention_pages: int = 8  # kept in memory, the newest

    # Each search is compiled for its own options: as many different ones as `searches` are admitted at once, after that
    # one more in each `search_seconds`; all compiled programs are dropped when there are more than `searches`.
    searches: int = 8
    search_seconds: float = 15.0

    # Of a connection.
    head_seconds: float = 10.0  # for the first line and the headers of its first request
    keep_alive_seconds: float = 75.0  # after an answer: longer than reverse proxies use a connection again (60 s)
    body_seconds: float = 10.0
    request_seconds: float = 60.0  # from the end of the body to the answer
    stop_seconds: float = 30.0  # for the requests in progress when the server is told to stop
