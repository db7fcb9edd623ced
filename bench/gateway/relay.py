"""A bare relay: aiohttp's low-level server and client, bytes forwarded unread."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def handler(session: aiohttp.ClientSession, upstream: str) -> Handler:
    async def relay(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        headers, url = {"content-type": "application/json"}, upstream + request.path
        async with session.request(request.method, url, data=body, headers=headers) as reply:
            content_type = reply.headers["content-type"]
            if reply.content_length is not None:
                return web.Response(
                    status=reply.status, body=await reply.read(), headers={"content-type": content_type}
                )
            response = web.StreamResponse(status=reply.status, headers={"content-type": content_type})
            await response.prepare(request)
            async for data in reply.content.iter_any():
                await response.write(data)
            await response.write_eof()
            return response

    return relay


async def main() -> None:
    port, upstream = int(sys.argv[1]), sys.argv[2]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        runner = web.ServerRunner(web.Server(handler(session, upstream), access_log=None))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
