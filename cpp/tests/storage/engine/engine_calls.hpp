// Updates as the tests of the chunk engine make them, and what they expect of it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "check.hpp"
#include "fireflyer/base/crc32c.hpp"
#include "fireflyer/storage/engine/engine.hpp"
#include "logged_disk.hpp"

namespace ff::test {

using Data = std::vector<std::byte>;

inline const ChunkId chunk{5, 7};

inline EngineOptions options() {
  EngineOptions o;
  o.group_bytes = 1 << 20;
  o.reserve = 0;
  return o;
}

inline Data noise(std::size_t n, std::uint64_t seed) {
  Random random{seed * 2 + 1};
  Data data(n);
  for (auto& byte : data) byte = static_cast<std::byte>(random.next() >> 21);
  return data;
}

inline Update update(UpdateKind kind, std::uint64_t version, std::uint32_t offset, const Data& data) {
  Update u;
  u.kind = kind;
  u.offset = offset;
  u.data = data;
  u.base = {version > 1 ? 1u : 0u, version - 1};
  u.next = {1, version};
  return u;
}

inline void put(ChunkEngine& engine, const ChunkId& id, std::uint64_t version, const Data& data, UpdateKind kind = UpdateKind::write, std::uint32_t offset = 0) {
  Lsn lsn = 0;
  engine.stage(id, update(kind, version, offset, data), lsn);
  engine.commit(id, {1, version});
  engine.flush();
}

inline Data got(ChunkEngine& engine, const ChunkId& id) {
  const auto view = engine.view(id);
  CHECK(view);
  Data data(view->content().length);
  CHECK(engine.read(*view, 0, data) == data.size());
  CHECK(view->content().crc == crc32c(0, data.data(), data.size()));
  return data;
}

template <class Call>
void refused(EngineErrorKind kind, const char* text, const Call& call) {
  try {
    call();
  } catch (const EngineError& error) {
    if (error.kind() != kind || std::string(error.what()).find(text) == std::string::npos) std::fprintf(stderr, "said: %s\n", error.what());
    CHECK(error.kind() == kind);
    CHECK(std::string(error.what()).find(text) != std::string::npos);
    return;
  }
  std::fprintf(stderr, "not refused: %s\n", text);
  std::exit(1);
}

}  // namespace ff::test
