#include "fireflyer/fuse/session.hpp"

#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include <fcntl.h>
#include <linux/fuse.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

namespace ff {
namespace {

// Of writes that were received. Whoever receives waits then, so it is more than files that do not go on should fill.
constexpr std::size_t max_written_bytes = std::size_t{1} << 30;
constexpr std::size_t least_adopted_bytes = std::size_t{128} << 10;  // less is copied
constexpr std::size_t least_sent_bytes = std::size_t{64} << 10;   // by a thread of its own
constexpr int answering_threads = 2;
constexpr std::chrono::seconds forget_wait{2};
constexpr int wake_signal = SIGURG;  // ignored where nobody handles it: a late one does no harm

std::mutex log_mutex;
std::string last_words;

// libfuse says why only in words; the one that made the error takes them.
void remember(enum fuse_log_level level, const char* format, va_list arguments) {
  if (level > FUSE_LOG_WARNING) return;
  char text[512];
  std::vsnprintf(text, sizeof text, format, arguments);
  std::string line(text);
  while (!line.empty() && (line.back() == '\n' || line.back() == ' ')) line.pop_back();
  const std::lock_guard lock(log_mutex);
  if (!line.empty()) last_words = line;
}

std::string take_last_words(const char* otherwise) {
  const std::lock_guard lock(log_mutex);
  std::string words = std::exchange(last_words, {});
  return words.empty() ? otherwise : words;
}

void on_wake(int) {}

void prepare_wake() {
  static const bool once = [] {
    struct sigaction action{};
    action.sa_handler = &on_wake;
    sigemptyset(&action.sa_mask);
    ::sigaction(wake_signal, &action, nullptr);
    return true;
  }();
  (void)once;
}

// Signals are for the threads of Python.
void block_signals() {
  sigset_t all;
  sigfillset(&all);
  sigdelset(&all, wake_signal);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
}

// The kernel ends the connection; the number is closed later, by whom it belongs to.
void let_go(int fd) {
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  if (nothing < 0) return;
  ::dup3(nothing, fd, O_CLOEXEC);
  ::close(nothing);
}

struct Receiving {
  fuse_buf buffer{};
};
thread_local Receiving* receiving = nullptr;

}  // namespace

// ---------------------------------------------------------------------------------------------- events

FuseEvents::FuseEvents() : descriptor_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (descriptor_ < 0) throw std::runtime_error(std::string("cannot make an event descriptor: ") + std::strerror(errno));
}

FuseEvents::~FuseEvents() { ::close(descriptor_); }

void FuseEvents::put(FuseEvent event) {
  const std::lock_guard lock(mutex_);
  events_.push_back(std::move(event));
  if (events_.size() > 1) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(descriptor_, &one, sizeof one);
}

std::vector<FuseEvent> FuseEvents::take(std::size_t limit) {
  std::vector<FuseEvent> taken;
  const std::lock_guard lock(mutex_);
  while (!events_.empty() && taken.size() < limit) {
    taken.push_back(std::move(events_.front()));
    events_.pop_front();
  }
  if (events_.empty()) {
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t n = ::read(descriptor_, &count, sizeof count);
  }
  return taken;
}

LocalFile::~LocalFile() { ::close(fd_); }

// ---------------------------------------------------------------------------------------------- life

FuseSession::FuseSession(const std::string& directory, const std::vector<std::string>& options)
    : pool_(std::make_shared<MemoryPool>(max_read_bytes)), incoming_(std::make_shared<MemoryPool>(max_written_bytes)) {
  prepare_wake();
  fuse_set_log_func(&remember);
  take_last_words("");
  std::string joined = "max_read=" + std::to_string(max_transfer_bytes);
  for (const std::string& option : options) joined += "," + option;
  fuse_args arguments = FUSE_ARGS_INIT(0, nullptr);
  for (const char* const one : {"ff", "-o", joined.c_str()}) fuse_opt_add_arg(&arguments, one);
  session_ = fuse_session_new(&arguments, &fuse_operations(), sizeof(fuse_lowlevel_ops), this);
  fuse_opt_free_args(&arguments);
  if (session_ == nullptr) throw std::runtime_error(take_last_words("libfuse cannot create a session"));
  if (fuse_session_mount(session_, directory.c_str()) == 0) {
    ::fcntl(fuse_session_fd(session_), F_SETFD, FD_CLOEXEC);
    pool_->on_room([this] {
      if (wants_room_.exchange(false)) events_.put({0, "room", 0, {}, {}});
    });
    return;
  }
  fuse_session_destroy(session_);
  throw std::runtime_error(take_last_words("the kernel refused the mount"));
}

FuseSession::~FuseSession() { close(); }

void FuseSession::start(int threads) {
  const std::lock_guard lock(threads_mutex_);
  for (int i = 0; i < answering_threads; ++i) answering_.emplace_back([this] { answer_with_data(); });
  for (int i = 0; i < threads; ++i) {
    ++running_;
    threads_.emplace_back([this] { work(); });
  }
}

void FuseSession::work() {
  block_signals();
  Receiving mine;
  receiving = &mine;
  while (!fuse_session_exited(session_)) {
    if (mine.buffer.mem == nullptr) mine.buffer.mem = incoming_->request_buffer();
    const int received = fuse_session_receive_buf(session_, &mine.buffer);
    if (received == -EINTR) continue;
    if (received <= 0) break;
    counts_.requested(static_cast<const fuse_in_header*>(mine.buffer.mem)->opcode);  // nothing is spliced
    fuse_session_process_buf(session_, &mine.buffer);
  }
  fuse_session_exit(session_);
  std::free(mine.buffer.mem);
  receiving = nullptr;
  const std::lock_guard lock(threads_mutex_);
  if (--running_ == 0) events_.put({0, "ended", 0, {}, {}});
  ended_.notify_all();
}

void FuseSession::stop() {
  if (ended_all_) return;
  fuse_session_exit(session_);
  pool_->end();
  incoming_->end();
  std::unique_lock lock(threads_mutex_);
  while (running_ > 0) {
    for (std::thread& thread : threads_) pthread_kill(thread.native_handle(), wake_signal);
    ended_.wait_for(lock, std::chrono::milliseconds(5));
  }
  lock.unlock();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void FuseSession::end(bool unmount) {
  if (ended_all_) return;
  stop();
  ended_all_ = true;
  {
    const std::lock_guard lock(answers_mutex_);
    answers_end_ = true;
    answers_wait_.notify_all();
  }
  for (std::thread& thread : answering_) thread.join();
  pool_->on_room(nullptr);
  std::unordered_map<std::uint64_t, Asked> open;
  {
    const std::lock_guard lock(asked_mutex_);
    open.swap(asked_);
  }
  for (auto& [number, asked] : open) fuse_reply_err(asked.request, ENOTCONN);
  if (unmount) fuse_session_unmount(session_);
  else let_go(fuse_session_fd(session_));
}

void FuseSession::close() {
  if (closed_) return;
  end(true);
  closed_ = true;
  // Who makes the kernel forget pages may wait for it as long as there is this process: then its end frees the session.
  const std::unique_lock lock(life_mutex_, forget_wait);
  if (!lock.owns_lock()) return;
  fuse_session_destroy(session_);
  session_ = nullptr;
}

void FuseSession::send(const Asked& asked, Memory memory, std::size_t count) {
  if (count >= least_sent_bytes) {
    const std::lock_guard lock(answers_mutex_);
    if (!answers_end_) {
      answers_.push_back({asked.request, std::move(memory), count});
      answers_wait_.notify_one();
      return;
    }
  }
  fuse_reply_buf(asked.request, reinterpret_cast<const char*>(memory.data), count);
}

void FuseSession::answer_with_data() {
  block_signals();
  std::unique_lock lock(answers_mutex_);
  while (true) {
    answers_wait_.wait(lock, [&] { return answers_end_ || !answers_.empty(); });
    if (answers_.empty()) return;
    const Answer next = std::move(answers_.front());
    answers_.pop_front();
    lock.unlock();
    fuse_reply_buf(next.request, reinterpret_cast<const char*>(next.memory.data), next.count);
    lock.lock();
  }
}

// ---------------------------------------------------------------------------------------------- requests

void FuseSession::interrupted(fuse_req_t request, void* given) {
  auto* const self = static_cast<FuseSession*>(fuse_req_userdata(request));
  self->events_.put({0, "interrupt", 0, {}, {reinterpret_cast<std::uint64_t>(given)}});
}

void FuseSession::ask(fuse_req_t request, const char* kind, std::uint64_t inode, std::vector<FuseArgument> arguments, std::size_t size, std::uint64_t handle,
                      bool interruptible) {
  const fuse_ctx* const context = fuse_req_ctx(request);
  FuseEvent event{0, kind, inode, {context->uid, context->gid, static_cast<std::uint32_t>(context->pid), {}}, std::move(arguments)};
  if (context->uid != 0) {
    gid_t groups[max_caller_groups];
    const int count = fuse_req_getgroups(request, max_caller_groups, groups);
    for (int i = 0; i < count && i < static_cast<int>(max_caller_groups); ++i) event.caller.groups.push_back(groups[i]);
  }
  {
    const std::lock_guard lock(asked_mutex_);
    event.number = next_++;
    asked_[event.number] = {request, size, handle};
  }
  const std::uint64_t number = event.number;
  // Before it can be answered, and freed by that.
  if (interruptible) fuse_req_interrupt_func(request, &FuseSession::interrupted, reinterpret_cast<void*>(number));
  events_.put(std::move(event));
}

std::optional<Memory> FuseSession::read_memory(std::size_t size) {
  std::optional<Memory> memory = pool_->try_take(size);
  if (memory) return memory;
  wants_room_ = true;
  return pool_->try_take(size);  // it may have been given back before we said so
}

FuseSession::Asked FuseSession::answer(std::uint64_t number) {
  const std::lock_guard lock(asked_mutex_);
  const auto found = asked_.find(number);
  if (found == asked_.end()) throw std::invalid_argument("request " + std::to_string(number) + " is not open: it was answered, or never made");
  const Asked asked = found->second;
  asked_.erase(found);
  return asked;
}

std::optional<FuseSession::Asked> FuseSession::peek(std::uint64_t number) {
  const std::lock_guard lock(asked_mutex_);
  const auto found = asked_.find(number);
  return found == asked_.end() ? std::nullopt : std::optional(found->second);
}

Memory FuseSession::received(const char* data, std::size_t size) {
  std::byte* const from = reinterpret_cast<std::byte*>(const_cast<char*>(data));
  if (size >= least_adopted_bytes && receiving != nullptr) return incoming_->adopt(std::exchange(receiving->buffer.mem, nullptr), from, size);
  Memory copy = incoming_->take(size);
  std::memcpy(copy.data, from, size);
  return copy;
}

std::shared_ptr<LocalFile> FuseSession::local(std::uint64_t handle) {
  const std::shared_lock lock(files_mutex_);
  const auto found = files_.find(handle);
  return found == files_.end() ? nullptr : found->second;
}

void FuseSession::keep(std::uint64_t handle, int fd) {
  auto file = std::make_shared<LocalFile>(fd);
  const std::unique_lock lock(files_mutex_);
  files_[handle] = std::move(file);
}

void FuseSession::drop(std::uint64_t handle) {
  std::shared_ptr<LocalFile> gone;
  const std::unique_lock lock(files_mutex_);
  const auto found = files_.find(handle);
  if (found == files_.end()) return;
  gone = std::move(found->second);
  files_.erase(found);
}

void FuseSession::forget_attributes(std::uint64_t inode) {
  const std::shared_lock lock(life_mutex_);
  if (!closed_) fuse_lowlevel_notify_inval_inode(session_, inode, -1, 0);
}

void FuseSession::forget_pages(std::uint64_t inode) {
  const std::shared_lock lock(life_mutex_);
  if (!closed_) fuse_lowlevel_notify_inval_inode(session_, inode, 0, 0);
}

void FuseSession::forget_entry(std::uint64_t parent, const std::string& name) {
  const std::shared_lock lock(life_mutex_);
  if (!closed_) fuse_lowlevel_notify_inval_entry(session_, parent, name.c_str(), name.size());
}

}  // namespace ff
