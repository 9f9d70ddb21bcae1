// A leader whose neighbour sends altered frames on its lanes and its control connection: an error names it, or the sum is
// right. PROGRAM [FIRST COUNT] runs other seeds.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <vector>

#include "check.hpp"
#include "fireflyer/base/crc32c.hpp"
#include "fireflyer/collectives/executor.hpp"
#include "fireflyer/collectives/transport/wire.hpp"
#include "fuzz.hpp"

using ff::FrameType;
using ff::Header;
using fuzz::Bytes;
using fuzz::Chance;

namespace {

constexpr std::int64_t second = 1'000'000'000;
constexpr std::size_t count = 40'000, chunk_bytes = 16'384;  // ten chunks, on both lanes
constexpr float mine = 1.0F, theirs = 2.0F;

ff::OpDescriptor right_op() { return {0, count, ff::OpKind::allreduce, ff::DType::f32, -1}; }

void alter(Chance& chance, Header& header) {
  switch (chance.below(12)) {
    case 0: return chance.alter(header.type);
    case 1: return chance.alter(header.channel);
    case 2: return chance.alter(header.dtype);
    case 3: return chance.alter(header.seq);
    case 4: return chance.alter(header.chunk);
    case 5: return chance.alter(header.count);
    case 6: return chance.alter(header.bytes);
    case 7: return chance.alter(header.kind);
    case 8: return chance.alter(header.root);
    case 9: return chance.alter(header.payload_crc);
    case 10: return chance.alter(header.block);
    default: return chance.alter(header.span);
  }
}

void finish(Chance& chance, Header header, const Bytes& payload, Bytes& all) {
  if (chance.one_in(4)) alter(chance, header);
  ff::seal(header);
  if (chance.one_in(30)) chance.alter(header.header_crc);
  fuzz::append(all, header);
  all.insert(all.end(), payload.begin(), payload.end());
}

// The chunks of a lane as a right neighbour would send them, with a few changes.
Bytes lane_frames(Chance& chance, std::uint64_t lane) {
  Bytes all;
  const std::size_t per_chunk = chunk_bytes / sizeof(float);
  for (std::uint64_t chunk = lane; chunk * per_chunk < count; chunk += 2) {
    const std::size_t elements = std::min(per_chunk, count - chunk * per_chunk);
    const std::vector<float> values(elements, theirs);
    const auto* const begin = reinterpret_cast<const char*>(values.data());
    const Bytes payload(begin, begin + elements * sizeof(float));
    Header header = ff::data_header(chance.one_in(2) ? FrameType::partial : FrameType::result, right_op());
    header.chunk = chunk;
    header.channel = static_cast<std::uint8_t>(lane);
    header.span = 1;
    header.bytes = static_cast<std::uint32_t>(payload.size());
    header.payload_crc = ff::crc32c(0, payload.data(), payload.size());
    finish(chance, header, payload, all);
    if (chance.one_in(12)) return all;
  }
  return all;
}

Bytes control_frames(Chance& chance) {
  Bytes all;
  for (std::uint64_t left = chance.below(6); left > 0; --left) {
    constexpr std::array<FrameType, 3> types{FrameType::heartbeat, FrameType::abort, FrameType::goodbye};
    const FrameType type = types[chance.below(chance.one_in(3) ? types.size() : 1)];
    Bytes payload;
    if (type == FrameType::heartbeat)
      for (std::uint64_t word : {1ULL, 0ULL, 0ULL, 3ULL}) fuzz::append(payload, chance.one_in(3) ? chance.telling(word) : word);
    if (type == FrameType::abort) payload = Bytes(chance.below(900), '\n');
    ff::OpDescriptor op = right_op();
    if (type == FrameType::abort) op.kind = static_cast<ff::OpKind>(1 + chance.below(4)), op.root = 1;
    finish(chance, ff::control_header(type, op, payload.data(), payload.size()), payload, all);
  }
  if (chance.one_in(5)) chance.damage(all);
  return all;
}

void round(std::uint64_t seed) {
  Chance chance(seed);
  ff::Config config;
  config.group = ff::Group{0, {0, 1}, {"rank 0", "rank 1"}, {{-1, 0}, {1, -1}}, 20 * second};
  config.window_fd = ff::Window::create(1, 4, chunk_bytes);
  config.doorbell_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  std::array<int, 3> ends{};  // control, then lanes
  for (int tree = -1; tree < 2; ++tree) {
    int fds[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    config.connections.push_back({tree, 1, 0, fds[0]});
    ends[static_cast<std::size_t>(tree + 1)] = fds[1];
  }
  ff::Executor executor(std::move(config));
  std::vector<float> array(count, mine);
  const auto work = executor.submit(right_op(), array.data(), array.data());
  std::array<Bytes, 3> attack{control_frames(chance), lane_frames(chance, 0), lane_frames(chance, 1)};
  std::array<std::size_t, 3> put{};
  for (const int fd : ends) CHECK(fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
  for (int tries = 0; tries < 1000 && !work->wait(0); ++tries) {
    bool moved = false;
    for (std::size_t i = 0; i < ends.size(); ++i) {
      Bytes heard(65536);
      while (recv(ends[i], heard.data(), heard.size(), 0) > 0) moved = true;
      if (put[i] == attack[i].size()) continue;
      const ssize_t n = send(ends[i], attack[i].data() + put[i], attack[i].size() - put[i], MSG_NOSIGNAL);
      if (n > 0) put[i] += static_cast<std::size_t>(n), moved = true;
      else if (n < 0 && errno != EAGAIN) put[i] = attack[i].size();
    }
    if (put[0] == attack[0].size() && put[1] == attack[1].size() && put[2] == attack[2].size() && tries > 20) break;
    if (!moved) usleep(200);
  }
  for (const int fd : ends) shutdown(fd, SHUT_RDWR);
  CHECK(work->wait(60 * second));
  const ff::Failure failure = work->failure();
  // Its own name, or whom it accuses in an abort.
  const bool named = failure.culprit >= 0 || failure.kind == ff::FailureKind::usage || failure.kind == ff::FailureKind::aborted || failure.text.find("reported by rank 1") != std::string::npos;
  if (failure.kind != ff::FailureKind::none && !named) std::fprintf(stderr, "kind %d culprit %d: %s\n", static_cast<int>(failure.kind), failure.culprit, failure.text.c_str());
  CHECK(failure.kind == ff::FailureKind::none || named);
  CHECK(failure.text.find('\n') == std::string::npos);
  executor.close();
  // Of a lane whose root is the other node, `result` frames say what the sum is: 2 is what a liar can make of it, not 1.
  if (failure.kind == ff::FailureKind::none) CHECK(std::all_of(array.begin(), array.end(), [](float value) { return value == mine + theirs || value == theirs; }));
  for (const int fd : ends) close(fd);
}

}  // namespace

int main(int argc, char** argv) {
  const fuzz::Seeds seeds(argc, argv, 300);
  for (std::uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
    std::fprintf(stderr, "\rseed %llu", static_cast<unsigned long long>(seed));
    round(seed);
  }
  std::puts("\naltered frames between nodes: all well");
  return 0;
}
