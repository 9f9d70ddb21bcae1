// A leader whose neighbour sends garbage: the error names the neighbour's rank, and nothing crashes or hangs.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "fireflyer/base/clock.hpp"
#include "fireflyer/base/crc32c.hpp"
#include "fireflyer/collectives/executor.hpp"
#include "fireflyer/collectives/transport/wire.hpp"

namespace {

constexpr std::int64_t second = 1'000'000'000;
constexpr std::size_t count = 100;

struct Ends {
  int trees[2];
  int control;
};

// Rank 0 is real, on node 0; rank 1 on node 1 is whatever `attack` does with its ends of the connections.
ff::Failure under_attack(const std::function<void(const Ends&)>& attack, std::int64_t timeout_ns = 3 * second, ff::DType dtype = ff::DType::f32, std::size_t elements = count) {
  ff::Config config;
  config.group = ff::Group{0, {0, 1}, {"rank 0", "rank 1"}, {{-1, 0}, {1, -1}}, timeout_ns};
  config.window_fd = ff::Window::create(1, 4, 4096);
  config.doorbell_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  Ends theirs{};
  for (int tree = -1; tree < 2; ++tree) {
    int fds[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    config.connections.push_back({tree, 1, 0, fds[0]});
    (tree < 0 ? theirs.control : theirs.trees[tree]) = fds[1];
  }
  ff::Executor executor(std::move(config));
  std::vector<float> array(elements, 1.0F);
  const auto work = executor.submit({0, elements, ff::OpKind::allreduce, dtype, -1}, array.data(), array.data());
  attack(theirs);
  CHECK(work->wait(30 * second));
  const ff::Failure failure = work->failure();
  executor.close();
  for (const int fd : {theirs.trees[0], theirs.trees[1], theirs.control}) close(fd);
  return failure;
}

void put(int fd, const void* data, std::size_t bytes) { CHECK(send(fd, data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes)); }

ff::OpDescriptor right_op() { return {0, count, ff::OpKind::allreduce, ff::DType::f32, -1}; }

ff::Header right_header(const std::vector<float>& payload) {
  ff::Header header = ff::data_header(ff::FrameType::partial, right_op());
  header.span = 1;
  header.bytes = static_cast<std::uint32_t>(payload.size() * sizeof(float));
  header.payload_crc = ff::crc32c(0, payload.data(), header.bytes);
  ff::seal(header);
  return header;
}

void expect(const ff::Failure& failure, ff::FailureKind kind, const std::string& words) {
  if (failure.kind != kind || failure.text.find(words) == std::string::npos) std::fprintf(stderr, "kind %d: %s\n", static_cast<int>(failure.kind), failure.text.c_str());
  CHECK(failure.kind == kind);
  CHECK(failure.text.find(words) != std::string::npos);
  CHECK(kind == ff::FailureKind::usage || failure.culprit == 1);
}

using Change = std::function<void(ff::Header&)>;

void a_changed_data_header_is_refused(const Change& change, ff::FailureKind kind, const std::string& words) {
  expect(under_attack([&](const Ends& ends) {
           const std::vector<float> payload(count, 2.0F);
           ff::Header header = right_header(payload);
           change(header);
           put(ends.trees[0], &header, sizeof header);
           put(ends.trees[0], payload.data(), payload.size() * sizeof(float));
         }),
         kind, words);
}

Change sealed(const Change& change) {
  return [change](ff::Header& header) {
    change(header);
    ff::seal(header);
  };
}

void data_frames() {
  using H = ff::Header;
  const auto peer = ff::FailureKind::peer_failed;
  a_changed_data_header_is_refused([](H& h) { h.magic ^= 1; }, peer, "does not speak this protocol");
  a_changed_data_header_is_refused(sealed([](H& h) { h.version = 9; }), peer, "speaks version 9");
  a_changed_data_header_is_refused(sealed([](H& h) { h.version = 1; }), peer, "speaks version 1");
  a_changed_data_header_is_refused([](H& h) { h.bytes ^= 4; }, peer, "header with a wrong checksum");
  a_changed_data_header_is_refused(sealed([](H& h) { h.reserved = 1; }), peer, "invalid");
  a_changed_data_header_is_refused(sealed([](H& h) { h.dtype = 200; }), peer, "invalid");
  a_changed_data_header_is_refused(sealed([](H& h) { h.bytes = 0xffffffff; }), peer, "out of order");
  a_changed_data_header_is_refused(sealed([](H& h) { h.chunk = 1; }), peer, "out of order");
  a_changed_data_header_is_refused(sealed([](H& h) { h.channel = 1; }), peer, "out of order");
  a_changed_data_header_is_refused(sealed([](H& h) { h.block = 1; }), peer, "out of order");
  a_changed_data_header_is_refused(sealed([](H& h) { h.span = 0; }), peer, "out of order");
  a_changed_data_header_is_refused(sealed([](H& h) { h.span = 0xffffffff; }), peer, "out of order");
  a_changed_data_header_is_refused(sealed([](H& h) { h.bytes = 0; }), peer, "out of order");
  a_changed_data_header_is_refused(sealed([](H& h) { h.type = ff::FrameType::result; }), peer, "out of order");
  a_changed_data_header_is_refused(sealed([](H& h) { h.type = ff::FrameType::contribution; }), peer, "out of order");  // of f32 it is none
  a_changed_data_header_is_refused(sealed([](H& h) { h.count = 99; }), ff::FailureKind::usage, "allreduce #0 of 99 f32");
  a_changed_data_header_is_refused(sealed([](H& h) { h.kind = 77; }), ff::FailureKind::usage, "unknown operation");
  a_changed_data_header_is_refused(sealed([](H& h) { h.seq = 5; }), ff::FailureKind::usage, "allreduce #5");
  a_changed_data_header_is_refused(sealed([](H& h) { h.payload_crc ^= 1; }), ff::FailureKind::corruption, "wrong checksum");
}

// What node 1 adds to the sum of an array of bf16: its rank's own elements, or a sum in f32.
ff::Failure added(ff::FrameType type, std::size_t bytes, ff::FrameType answer = ff::FrameType::result) {
  const auto attack = [&](const Ends& ends) {
    const std::vector<std::uint16_t> payload(bytes / 2, 0);
    ff::OpDescriptor op = right_op();
    op.dtype = ff::DType::bf16;
    ff::Header header = ff::data_header(type, op);
    header.span = 1;
    header.bytes = static_cast<std::uint32_t>(bytes);
    header.payload_crc = ff::crc32c(0, payload.data(), bytes);
    ff::seal(header);
    put(ends.trees[0], &header, sizeof header);
    put(ends.trees[0], payload.data(), bytes);
    if (answer != ff::FrameType::result) return;
    CHECK(recv(ends.trees[0], &header, sizeof header, MSG_WAITALL) == sizeof header);
    CHECK(header.type == answer && header.bytes == 2 * count);
  };
  return under_attack(attack, 3 * second, ff::DType::bf16);
}

// Chunk 1 has its root at node 1: node 0 sends what it has there, its rank's elements and no sum.
void a_contribution_is_sent_as_it_is() {
  constexpr std::size_t in_a_chunk = 1024, behind = 10;
  bool seen = false;
  const auto attack = [&](const Ends& ends) {
    ff::Header header{};
    CHECK(recv(ends.trees[1], &header, sizeof header, MSG_WAITALL) == sizeof header);
    seen = header.type == ff::FrameType::contribution && header.bytes == 2 * behind;
    put(ends.control, "x", 1);
    shutdown(ends.control, SHUT_RDWR);
  };
  under_attack(attack, 3 * second, ff::DType::bf16, in_a_chunk + behind);
  CHECK(seen);
}

void contributions() {
  a_contribution_is_sent_as_it_is();
  const auto none = ff::FrameType::abort;
  CHECK(added(ff::FrameType::contribution, 2 * count).kind == ff::FailureKind::none);
  CHECK(added(ff::FrameType::partial, 4 * count).kind == ff::FailureKind::none);
  for (const std::size_t bytes : {std::size_t{0}, 2 * count - 2, 4 * count}) expect(added(ff::FrameType::contribution, bytes, none), ff::FailureKind::peer_failed, "out of order");
  expect(added(ff::FrameType::partial, 2 * count, none), ff::FailureKind::peer_failed, "out of order");
}

ff::Failure told(ff::FrameType type, const ff::OpDescriptor& op, const std::string& payload, const Change& change = {}) {
  return under_attack([&](const Ends& ends) {
    ff::Header header = ff::control_header(type, op, payload.data(), payload.size());
    if (change) change(header);
    put(ends.control, &header, sizeof header);
    if (!payload.empty()) put(ends.control, payload.data(), payload.size());
  });
}

void control_frames() {
  const auto peer = ff::FailureKind::peer_failed;
  const ff::OpDescriptor op = right_op();
  expect(told(ff::FrameType::heartbeat, op, "short"), peer, "invalid");
  expect(told(ff::FrameType::heartbeat, op, std::string(1000, 'x')), peer, "invalid");
  expect(told(ff::FrameType::partial, op, ""), peer, "invalid");
  expect(told(static_cast<ff::FrameType>(99), op, ""), peer, "invalid");
  expect(told(ff::FrameType::heartbeat, op, std::string(32, '\0'), sealed([](ff::Header& h) { h.bytes = 1 << 30; })), peer, "too long");
  expect(told(ff::FrameType::heartbeat, op, std::string(32, '\0'), sealed([](ff::Header& h) { h.payload_crc ^= 1; })), peer, "wrong checksum");
  ff::OpDescriptor abort = op;
  abort.kind = static_cast<ff::OpKind>(ff::FailureKind::peer_failed);
  abort.root = 1;
  expect(told(ff::FrameType::abort, abort, "rank 1 \n fell\x1b over"), peer, "rank 1   fell  over");
  abort.root = -1;
  {
    const ff::Failure failure = told(ff::FrameType::abort, abort, "somebody fell over");
    CHECK(failure.kind == peer && failure.culprit == -1 && failure.text == "somebody fell over (reported by rank 1)");
  }
  abort.root = 2;
  expect(told(ff::FrameType::abort, abort, "nobody"), peer, "invalid");
  abort.root = 1;
  abort.kind = static_cast<ff::OpKind>(17);
  expect(told(ff::FrameType::abort, abort, "?"), peer, "invalid");
  expect(told(ff::FrameType::abort, abort, std::string(900, 'x')), peer, "invalid");
}

void silence_and_noise() {
  const auto peer = ff::FailureKind::peer_failed;
  expect(under_attack([](const Ends& ends) { shutdown(ends.control, SHUT_RDWR); }), peer, "died");
  expect(under_attack([](const Ends& ends) { shutdown(ends.trees[0], SHUT_RDWR); }), peer, "broke its connection");
  expect(under_attack([](const Ends&) {}), peer, "sent no heartbeat");
  std::mt19937 chance(7);
  for (int round = 0; round < 40; ++round) {
    std::vector<unsigned char> noise(64 + chance() % 400);
    for (auto& byte : noise) byte = static_cast<unsigned char>(chance());
    const ff::Failure failure = under_attack([&](const Ends& ends) { put(round % 2 ? ends.control : ends.trees[0], noise.data(), noise.size()); });
    CHECK(failure.kind == peer && failure.culprit == 1);
  }
}

// A bug of ours, as seen from another node: the peer lives, is inside the operation, and never sends a frame.
void a_frame_that_is_never_sent() {
  const std::int64_t timeout_ns = second;  // in which this thread must have moved, too, under any sanitizer
  const ff::Failure failure = under_attack(
      [&](const Ends& ends) {
        const std::uint64_t words[] = {1, 0, 0, 1 << 1 | 1};  // inside; no frame on either connection; its rank is inside #0
        const std::string payload(reinterpret_cast<const char*>(words), sizeof words);
        const ff::Header header = ff::control_header(ff::FrameType::heartbeat, right_op(), payload.data(), payload.size());
        char heard[4096];
        ssize_t got = 1;
        while (got != 0) {  // until it takes leave
          put(ends.control, &header, sizeof header);
          put(ends.control, payload.data(), payload.size());
          poll(nullptr, 0, 10);
          do {
            got = recv(ends.control, heard, sizeof heard, MSG_DONTWAIT);
          } while (got > 0);
        }
      },
      timeout_ns);
  expect(failure, ff::FailureKind::peer_failed, "sent nothing in allreduce #0");
}

// The same inside a node: the other rank has entered, moves its hands, and never says that its chunk is there.
void a_chunk_that_is_never_copied() {
  const std::int64_t timeout_ns = second;  // in which this thread must have moved, too, under any sanitizer
  ff::Config config;
  config.group = ff::Group{0, {0, 0}, {"rank 0", "rank 1"}, {{-1}, {-1}}, timeout_ns};
  const int fd = config.window_fd = ff::Window::create(2, 4, 4096);
  const ff::Window shared(fd, -1);
  std::vector<float> array(40'000, 1.0F);
  ff::Executor executor(std::move(config));
  const ff::OpDescriptor op{0, array.size(), ff::OpKind::allreduce, ff::DType::f32, -1};
  const auto work = executor.submit(op, array.data(), array.data());
  shared.enter(1, ff::Geometry(op, 0, 4096, 2), ff::Places{});
  while (!work->wait(second / 100)) shared.line(1).heartbeat_ns.store(ff::monotonic_ns());
  const ff::Failure failure = work->failure();
  executor.close();
  CHECK(failure.kind == ff::FailureKind::peer_failed && failure.culprit == -1);  // nobody is blamed for waiting
  CHECK(failure.text.find("allreduce #0 has made no progress for") != std::string::npos);
}

}  // namespace

int main() {
  data_frames();
  contributions();
  control_frames();
  silence_and_noise();
  a_frame_that_is_never_sent();
  a_chunk_that_is_never_copied();
  std::puts("hostile peer: all well");
  return 0;
}
