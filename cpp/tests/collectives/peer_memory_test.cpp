// What a rank says when it cannot get at another's array, with real processes as the others; and who may read whom for how long.
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "fireflyer/collectives/executor.hpp"

namespace {

constexpr std::int64_t second = 1'000'000'000;
constexpr std::size_t page = 4096;
constexpr std::size_t count = 40'000;

std::vector<unsigned long> permissions;  // what was asked of Yama, in order

// A child that lives until it is told to end; its memory is a copy of this process's.
class Child {
 public:
  Child() {
    CHECK(pipe(pipe_) == 0);
    pid_ = fork();
    CHECK(pid_ >= 0);
    if (pid_ == 0) {
      close(pipe_[1]);
      char byte;
      [[maybe_unused]] const auto got = read(pipe_[0], &byte, 1);
      _exit(0);
    }
    close(pipe_[0]);
  }
  ~Child() { end(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  void end() {
    if (pid_ == 0) return;
    close(pipe_[1]);
    CHECK(waitpid(pid_, nullptr, 0) == pid_);
    pid_ = 0;
  }
  pid_t pid() const { return pid_; }

 private:
  int pipe_[2];
  pid_t pid_ = 0;
};

ff::MemoryProbe probe_of(const Child& child) {
  ff::MemoryProbe probe = ff::memory_probe();
  probe.pid = static_cast<std::uint64_t>(child.pid());
  return probe;
}

// Rank 0 is here, rank 1 is the child, whose entering and finishing is done for it in the shared memory.
struct Pair {
  ff::Group group{0, {0, 0}, {"rank 0", "rank 1"}, {{-1}, {-1}}, 20 * second};
  int fd = ff::Window::create(2, 4, page);
  ff::Window window{fd, -1};
  ff::OpDescriptor op{0, count, ff::OpKind::allreduce, ff::DType::f32, -1};
  std::vector<float> array = std::vector<float>(count, 1.0F);

  ff::Failure reduce_with(const Child& child, const void* theirs, const std::function<void()>& first = {}) {
    ff::Config config;
    config.group = group;
    config.window_fd = fd;
    config.doorbell_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    config.local_peers = {{ff::memory_probe(), -1}, {probe_of(child), -1}};
    ff::Executor executor(std::move(config));
    ff::Places places;
    places.in = places.out = reinterpret_cast<std::uint64_t>(theirs);
    if (first) first();
    window.enter(1, ff::Geometry(op, 0, page, 2), places);
    const auto work = executor.submit(op, array.data(), array.data());
    CHECK(work->wait(60 * second));
    const ff::Failure failure = work->failure();
    executor.close();
    return failure;
  }
};

void expect(const ff::Failure& failure, ff::FailureKind kind, int culprit, const std::string& words) {
  const bool right = failure.kind == kind && failure.culprit == culprit && failure.text.find(words) != std::string::npos;
  if (!right) std::fprintf(stderr, "kind %d, culprit %d: %s\n", static_cast<int>(failure.kind), failure.culprit, failure.text.c_str());
  CHECK(right);
}

bool can_see_children() {
  const Child child;
  return ff::can_access(probe_of(child));
}

void an_array_that_was_freed_is_no_death() {
  void* map = mmap(nullptr, count * sizeof(float), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(map != MAP_FAILED);
  std::memset(map, 0, count * sizeof(float));
  const auto partly = [&](std::size_t kept) {
    CHECK(munmap(static_cast<char*>(map) + kept, count * sizeof(float) - kept) == 0);
    const Child child;
    Pair pair;
    const ff::Failure failure = pair.reduce_with(child, map);
    expect(failure, ff::FailureKind::usage, -1, "rank 0 cannot reach an array of rank 1 in allreduce #0: Bad address; an array was freed");
    CHECK(failure.text.find("died") == std::string::npos);
  };
  partly(page);  // copied in part, then refused
  partly(0);
}

void an_array_that_may_not_be_written_is_no_death() {
  void* map = mmap(nullptr, count * sizeof(float), PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(map != MAP_FAILED);
  const Child child;
  expect(Pair().reduce_with(child, map), ff::FailureKind::usage, -1, "Bad address; an array was freed, unmapped or made read-only");
  CHECK(munmap(map, count * sizeof(float)) == 0);
}

void a_process_that_has_ended_is_named() {
  std::vector<float> theirs(count, 1.0F);
  Child child;
  expect(Pair().reduce_with(child, theirs.data(), [&] { child.end(); }), ff::FailureKind::peer_failed, 1, "rank 1 died during allreduce #0: its process has ended");
}

void other_errors_blame_nobody_for_dying() {
  Pair pair;
  const Child child;
  const ff::PeerAccess access(pair.window, 0, nullptr, {{ff::memory_probe(), -1}, {probe_of(child), -1}});
  expect(access.lost(pair.group, 1, pair.op, EPERM), ff::FailureKind::peer_failed, -1, std::string(std::strerror(EPERM)) + "; the permission to read its memory was revoked");
  expect(access.lost(pair.group, 1, pair.op, ENOMEM), ff::FailureKind::peer_failed, 0, std::strerror(ENOMEM));
  expect(access.lost(pair.group, 1, pair.op, EIO), ff::FailureKind::peer_failed, -1, std::strerror(EIO));
  expect(access.lost(pair.group, 1, pair.op, ERANGE), ff::FailureKind::peer_failed, 1, "named an array outside its arena");
  close(pair.fd);
}

// Its number may be a stranger's by then: what was read is not believed, though reading succeeded.
void what_was_read_of_an_ended_process_is_not_believed() {
  Pair pair;
  Child child;
  const ff::PeerAccess access(pair.window, 0, nullptr, {{ff::memory_probe(), -1}, {probe_of(child), -1}});
  CHECK(!access.betrayed(pair.group, pair.op));
  const ff::Process process(child.pid());
  if (process.descriptor() >= 0) {
    const pid_t pid = child.pid();
    const auto met = ff::Process::met(pid);
    CHECK(!process.ended() && ff::Process::met(pid) == met);
    child.end();
    CHECK(process.ended());
    CHECK(ff::Process::met(pid) != met);
    const auto failure = access.betrayed(pair.group, pair.op);
    CHECK(failure);
    expect(*failure, ff::FailureKind::peer_failed, 1, "its process has ended");
    expect(access.lost(pair.group, 1, pair.op, EFAULT), ff::FailureKind::peer_failed, 1, "its process has ended");
  }
  close(pair.fd);
}

// A group that was made while one of its processes was replaced by another with the same number.
void another_process_is_not_taken_for_a_rank() {
  Pair pair;
  std::vector<float> theirs(count, 1.0F);
  const Child child;
  ff::MemoryProbe wrong = probe_of(child);
  ++wrong.number;
  const ff::PeerAccess access(pair.window, 0, nullptr, {{ff::memory_probe(), -1}, {wrong, -1}});
  ff::Places places;
  places.in = reinterpret_cast<std::uint64_t>(theirs.data());
  char scratch[64];
  CHECK(access.input(1, places, 0, sizeof scratch, scratch) == nullptr && errno == ESRCH);
  close(pair.fd);
}

void others_may_read_only_while_a_group_needs_it() {
  permissions.clear();
  {
    const ff::OpenMemory first;
    {
      ff::OpenMemory again;
      again.close();
      again.close();
    }
    CHECK(permissions == std::vector<unsigned long>{PR_SET_PTRACER_ANY});
  }
  CHECK((permissions == std::vector<unsigned long>{PR_SET_PTRACER_ANY, 0}));
  permissions.clear();
  std::vector<float> theirs(count, 1.0F);
  Child child;
  Pair().reduce_with(child, theirs.data(), [&] {
    CHECK(permissions == std::vector<unsigned long>{PR_SET_PTRACER_ANY});
    child.end();
  });
  CHECK((permissions == std::vector<unsigned long>{PR_SET_PTRACER_ANY, 0}));
  permissions.clear();
  {
    ff::Config config;
    config.group = ff::Group{0, {0}, {"rank 0"}, {{-1}, {-1}}, second};
    config.window_fd = ff::Window::create(1, 4, page);
    config.doorbell_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    config.local_peers = {{ff::memory_probe(), -1}};
    ff::Executor alone(std::move(config));
  }
  CHECK(permissions.empty());
}

void a_child_neither_has_nor_takes_its_parents_permission() {
  permissions.clear();
  auto parents = std::make_unique<ff::OpenMemory>();
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    permissions.clear();
    parents.reset();
    if (!permissions.empty()) _exit(1);
    ff::OpenMemory own;
    _exit(permissions == std::vector<unsigned long>{PR_SET_PTRACER_ANY} ? 0 : 2);
  }
  int status = -1;
  CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

void many_groups_map_an_arena_once() {
#ifdef __SANITIZE_THREAD__
  return;  // they do not: see Arena::shared
#endif
  const int fd = ff::Arena::create(1 << 20), other = ff::Arena::create(1 << 20), again = dup(fd);
  {
    const auto first = ff::Arena::shared(fd), same = ff::Arena::shared(again), apart = ff::Arena::shared(other);
    CHECK(first == same && first != apart);
    first->base()[0] = 1;
  }
  Pair pair;
  std::vector<std::unique_ptr<ff::PeerAccess>> groups;
  std::vector<const char*> seen;
  for (int group = 0; group < 50; ++group) {
    groups.push_back(std::make_unique<ff::PeerAccess>(pair.window, 0, nullptr, std::vector<ff::LocalPeer>{{{}, -1}, {{}, group % 2 ? fd : again}}));
    ff::Places places;
    places.in_arena = 0;
    seen.push_back(groups.back()->input(1, places, 0, 1, nullptr));
    CHECK(seen.back() == seen.front() && *seen.back() == 1);
  }
  ff::Places wild;
  for (const std::uint64_t start : {std::uint64_t{2} << 20, ff::never - 1, ff::never - 4096}) {
    wild.in_arena = wild.out_arena = start;
    CHECK(groups[0]->input(1, wild, 4096, 4096, nullptr) == nullptr && groups[0]->direct_output(1, wild, 4096, 4096) == nullptr);
  }
  groups.clear();
  for (const int one : {fd, other, again, pair.fd}) close(one);
}

}  // namespace

extern "C" int prctl(int option, ...) noexcept {  // in the place of the system's, which few machines have Yama for
  va_list arguments;
  va_start(arguments, option);
  if (option == PR_SET_PTRACER) permissions.push_back(va_arg(arguments, unsigned long));
  va_end(arguments);
  return 0;
}

int main() {
  others_may_read_only_while_a_group_needs_it();
  a_child_neither_has_nor_takes_its_parents_permission();
  many_groups_map_an_arena_once();
  if (can_see_children()) {
    an_array_that_was_freed_is_no_death();
    an_array_that_may_not_be_written_is_no_death();
    a_process_that_has_ended_is_named();
    other_errors_blame_nobody_for_dying();
    what_was_read_of_an_ended_process_is_not_believed();
    another_process_is_not_taken_for_a_rank();
  } else {
    std::puts("peer memory: this system permits nobody to read another process");
  }
  std::puts("peer memory: all well");
  return 0;
}
