// What the kernel asks, as libfuse calls it: most of it becomes an event as it is.
#include <linux/fuse.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fireflyer/fuse/session.hpp"

namespace ff {
namespace {

FuseSession& of(fuse_req_t request) { return *static_cast<FuseSession*>(fuse_req_userdata(request)); }
void refuse(fuse_req_t request, int error) {
  of(request).counts().refused(error);
  fuse_reply_err(request, error);
}
std::uint64_t handle_of(const fuse_file_info* file) { return file == nullptr ? 0 : file->fh; }
std::uint64_t number(std::uint64_t value) { return value; }
std::int64_t signed_number(std::int64_t value) { return value; }
// Times that 64 bits of nanoseconds cannot say (before 1677, behind 2262) become the nearest that they can.
std::int64_t nanoseconds(const timespec& time) {
  constexpr std::int64_t second_ns = 1'000'000'000, most_seconds = INT64_MAX / second_ns - 1;
  if (time.tv_sec > most_seconds) return most_seconds * second_ns;
  if (time.tv_sec < -most_seconds) return -most_seconds * second_ns;
  return std::int64_t{time.tv_sec} * second_ns + time.tv_nsec;
}
// Owners of locks are 63 bits wide for those that keep them.
std::uint64_t owner_of(std::uint64_t given) { return given & ~(std::uint64_t{1} << 63); }

void want(fuse_conn_info* connection, unsigned what) { connection->want |= connection->capable & what; }

void init(void*, fuse_conn_info* connection) {
  want(connection, FUSE_CAP_ASYNC_READ | FUSE_CAP_POSIX_LOCKS | FUSE_CAP_FLOCK_LOCKS | FUSE_CAP_ATOMIC_O_TRUNC | FUSE_CAP_READDIRPLUS |
                       FUSE_CAP_READDIRPLUS_AUTO | FUSE_CAP_AUTO_INVAL_DATA | FUSE_CAP_ASYNC_DIO | FUSE_CAP_PARALLEL_DIROPS | FUSE_CAP_CACHE_SYMLINKS);
  // Data are received into memory that who answers can use; writes reach us before close returns.
  connection->want &= ~static_cast<unsigned>(FUSE_CAP_SPLICE_READ | FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE | FUSE_CAP_WRITEBACK_CACHE);
  connection->max_write = max_transfer_bytes;
  connection->max_read = max_transfer_bytes;
  connection->max_readahead = static_cast<unsigned>(8 * max_transfer_bytes);
  // The kernel keeps what is beyond in a queue of its own, whose files it is for: so many may wait for chains that are
  // away. From the threshold on it fetches nothing ahead.
  connection->max_background = 1024;
  connection->congestion_threshold = 48;
}

// What changes nothing: who waits for it may be told to wait no more.
void look(fuse_req_t request, const char* kind, std::uint64_t inode, std::vector<FuseArgument> arguments, std::size_t size = 0, std::uint64_t handle = 0) {
  of(request).ask(request, kind, inode, std::move(arguments), size, handle, true);
}

// --- names

void lookup(fuse_req_t request, fuse_ino_t parent, const char* name) { look(request, "lookup", parent, {std::string(name)}); }
void forget(fuse_req_t request, fuse_ino_t, std::uint64_t) { fuse_reply_none(request); }
void forget_multi(fuse_req_t request, std::size_t, fuse_forget_data*) { fuse_reply_none(request); }
void readlink(fuse_req_t request, fuse_ino_t inode) { look(request, "readlink", inode, {}); }
void mknod(fuse_req_t request, fuse_ino_t parent, const char* name, mode_t mode, dev_t device) {
  of(request).ask(request, "mknod", parent, {std::string(name), number(mode), number(device)});
}
void mkdir(fuse_req_t request, fuse_ino_t parent, const char* name, mode_t mode) {
  of(request).ask(request, "mkdir", parent, {std::string(name), number(mode)});
}
void unlink(fuse_req_t request, fuse_ino_t parent, const char* name) { of(request).ask(request, "unlink", parent, {std::string(name)}); }
void rmdir(fuse_req_t request, fuse_ino_t parent, const char* name) { of(request).ask(request, "rmdir", parent, {std::string(name)}); }
void symlink(fuse_req_t request, const char* target, fuse_ino_t parent, const char* name) {
  of(request).ask(request, "symlink", parent, {std::string(name), std::string(target)});
}
void rename(fuse_req_t request, fuse_ino_t parent, const char* name, fuse_ino_t to, const char* new_name, unsigned flags) {
  of(request).ask(request, "rename", parent, {std::string(name), number(to), std::string(new_name), number(flags)});
}
void link(fuse_req_t request, fuse_ino_t inode, fuse_ino_t parent, const char* name) {
  of(request).ask(request, "link", inode, {number(parent), std::string(name)});
}

// --- attributes

void getattr(fuse_req_t request, fuse_ino_t inode, fuse_file_info* file) { look(request, "getattr", inode, {handle_of(file)}); }

void setattr(fuse_req_t request, fuse_ino_t inode, struct stat* to, int which, fuse_file_info* file) {
  of(request).ask(request, "setattr", inode,
                  {handle_of(file), number(static_cast<unsigned>(which)), number(to->st_mode & 07777), number(to->st_uid), number(to->st_gid),
                   signed_number(to->st_size), nanoseconds(to->st_atim), nanoseconds(to->st_mtim)});
}

void access(fuse_req_t request, fuse_ino_t inode, int mask) { look(request, "access", inode, {number(static_cast<unsigned>(mask))}); }

void statfs(fuse_req_t request, fuse_ino_t inode) { look(request, "statfs", inode, {}); }

// The kernel asks for these with each write, or with each look at rights; there are none. No program is refused by that.
bool of_the_kernel(std::string_view name) { return name.starts_with("security.") || name.starts_with("system."); }

void getxattr(fuse_req_t request, fuse_ino_t inode, const char* name, std::size_t size) {
  if (of_the_kernel(name)) {
    fuse_reply_err(request, ENODATA);
    return;
  }
  look(request, "getxattr", inode, {std::string(name), number(size)}, size);
}
void listxattr(fuse_req_t request, fuse_ino_t inode, std::size_t size) { look(request, "listxattr", inode, {number(size)}, size); }
void setxattr(fuse_req_t request, fuse_ino_t inode, const char* name, const char* value, std::size_t size, int flags) {
  if (of_the_kernel(name)) {
    refuse(request, EOPNOTSUPP);
    return;
  }
  of(request).ask(request, "setxattr", inode, {std::string(name), std::string(value, size), number(static_cast<unsigned>(flags))});
}
void removexattr(fuse_req_t request, fuse_ino_t inode, const char* name) { of(request).ask(request, "removexattr", inode, {std::string(name)}); }

// --- files

void open(fuse_req_t request, fuse_ino_t inode, fuse_file_info* file) {
  of(request).ask(request, "open", inode, {number(static_cast<unsigned>(file->flags))});
}
void create(fuse_req_t request, fuse_ino_t parent, const char* name, mode_t mode, fuse_file_info* file) {
  of(request).ask(request, "create", parent, {std::string(name), number(mode), number(static_cast<unsigned>(file->flags))});
}

void read(fuse_req_t request, fuse_ino_t inode, std::size_t size, off_t offset, fuse_file_info* file) {
  FuseSession& session = of(request);
  if (const auto local = session.local(file->fh)) {
    Memory memory = session.pool().take(size);
    const ssize_t count = ::pread(local->fd(), memory.data, size, offset);
    if (count < 0) {
      refuse(request, errno);
      return;
    }
    session.counts().read(static_cast<std::size_t>(count));
    fuse_reply_buf(request, reinterpret_cast<const char*>(memory.data), static_cast<std::size_t>(count));
    return;
  }
  session.ask(request, "read", inode, {number(file->fh), number(static_cast<std::uint64_t>(offset)), number(size)}, size, file->fh, true);
}

void write(fuse_req_t request, fuse_ino_t inode, const char* data, std::size_t size, off_t offset, fuse_file_info* file) {
  FuseSession& session = of(request);
  if (const auto local = session.local(file->fh)) {
    const ssize_t count = ::pwrite(local->fd(), data, size, offset);
    if (count < 0) {
      refuse(request, errno);
      return;
    }
    session.counts().written(static_cast<std::size_t>(count));
    fuse_reply_write(request, static_cast<std::size_t>(count));
    return;
  }
  session.ask(request, "write", inode, {number(file->fh), number(static_cast<std::uint64_t>(offset)), session.received(data, size)}, size, file->fh);
}

void flush(fuse_req_t request, fuse_ino_t inode, fuse_file_info* file) {
  if (of(request).local(file->fh)) {
    fuse_reply_err(request, 0);
    return;
  }
  of(request).ask(request, "flush", inode, {number(file->fh), owner_of(file->lock_owner)});
}
void fsync(fuse_req_t request, fuse_ino_t inode, int data_only, fuse_file_info* file) {
  of(request).ask(request, "fsync", inode, {number(file->fh), number(data_only != 0)});
}
void release(fuse_req_t request, fuse_ino_t inode, fuse_file_info* file) {
  of(request).drop(file->fh);
  of(request).ask(request, "release", inode, {number(file->fh), owner_of(file->lock_owner), number(file->flock_release)});
}
void fallocate(fuse_req_t request, fuse_ino_t inode, int mode, off_t offset, off_t length, fuse_file_info* file) {
  of(request).ask(request, "fallocate", inode,
                  {number(file->fh), number(static_cast<unsigned>(mode)), number(static_cast<std::uint64_t>(offset)), number(static_cast<std::uint64_t>(length))});
}

// --- directories

void opendir(fuse_req_t request, fuse_ino_t inode, fuse_file_info*) { of(request).ask(request, "opendir", inode, {}); }
void list(fuse_req_t request, const char* kind, fuse_ino_t inode, std::size_t size, off_t offset, const fuse_file_info* file) {
  look(request, kind, inode, {number(file->fh), number(static_cast<std::uint64_t>(offset)), number(size)}, size, file->fh);
}
void readdir(fuse_req_t request, fuse_ino_t inode, std::size_t size, off_t offset, fuse_file_info* file) {
  list(request, "readdir", inode, size, offset, file);
}
void readdirplus(fuse_req_t request, fuse_ino_t inode, std::size_t size, off_t offset, fuse_file_info* file) {
  list(request, "readdirplus", inode, size, offset, file);
}
void releasedir(fuse_req_t request, fuse_ino_t inode, fuse_file_info* file) { of(request).ask(request, "releasedir", inode, {number(file->fh)}); }
void fsyncdir(fuse_req_t request, fuse_ino_t, int, fuse_file_info*) { fuse_reply_err(request, 0); }

// --- locks. Of ranges: the last byte is the kernel's, the end behind it is ours.

std::uint64_t end_of(const struct flock& lock) { return lock.l_len == 0 ? INT64_MAX : static_cast<std::uint64_t>(lock.l_start + lock.l_len); }

void getlk(fuse_req_t request, fuse_ino_t inode, fuse_file_info* file, struct flock* lock) {
  of(request).ask(request, "getlk", inode,
                  {number(file->fh), owner_of(file->lock_owner), signed_number(lock->l_type), number(static_cast<std::uint64_t>(lock->l_start)), end_of(*lock)});
}
void setlk(fuse_req_t request, fuse_ino_t inode, fuse_file_info* file, struct flock* lock, int wait) {
  of(request).ask(request, "setlk", inode,
                  {number(file->fh), owner_of(file->lock_owner), signed_number(lock->l_type), number(static_cast<std::uint64_t>(lock->l_start)), end_of(*lock),
                   signed_number(lock->l_pid), number(wait != 0)},
                  0, file->fh, wait != 0);
}
void flock(fuse_req_t request, fuse_ino_t inode, fuse_file_info* file, int operation) {
  const bool wait = (operation & LOCK_NB) == 0;
  of(request).ask(request, "flock", inode, {number(file->fh), owner_of(file->lock_owner), signed_number(operation & ~LOCK_NB), number(wait)}, 0, file->fh, wait);
}

}  // namespace

const fuse_lowlevel_ops& fuse_operations() {
  static const fuse_lowlevel_ops operations = [] {
    fuse_lowlevel_ops made{};
    made.init = &init;
    made.lookup = &lookup, made.forget = &forget, made.forget_multi = &forget_multi;
    made.getattr = &getattr, made.setattr = &setattr, made.access = &access, made.readlink = &readlink;
    made.mknod = &mknod, made.mkdir = &mkdir, made.unlink = &unlink, made.rmdir = &rmdir;
    made.symlink = &symlink, made.rename = &rename, made.link = &link;
    made.open = &open, made.create = &create, made.read = &read, made.write = &write;
    made.flush = &flush, made.release = &release, made.fsync = &fsync, made.fallocate = &fallocate;
    made.opendir = &opendir, made.readdir = &readdir, made.readdirplus = &readdirplus;
    made.releasedir = &releasedir, made.fsyncdir = &fsyncdir, made.statfs = &statfs;
    made.setxattr = &setxattr, made.getxattr = &getxattr, made.listxattr = &listxattr, made.removexattr = &removexattr;
    made.getlk = &getlk, made.setlk = &setlk, made.flock = &flock;
    return made;
  }();
  return operations;
}

const char* name_of_opcode(std::size_t opcode) {
  switch (opcode) {
    case FUSE_LOOKUP: return "lookup";
    case FUSE_FORGET: return "forget";
    case FUSE_BATCH_FORGET: return "batch_forget";
    case FUSE_GETATTR: return "getattr";
    case FUSE_SETATTR: return "setattr";
    case FUSE_READLINK: return "readlink";
    case FUSE_SYMLINK: return "symlink";
    case FUSE_MKNOD: return "mknod";
    case FUSE_MKDIR: return "mkdir";
    case FUSE_UNLINK: return "unlink";
    case FUSE_RMDIR: return "rmdir";
    case FUSE_RENAME:
    case FUSE_RENAME2: return "rename";
    case FUSE_LINK: return "link";
    case FUSE_OPEN: return "open";
    case FUSE_CREATE: return "create";
    case FUSE_READ: return "read";
    case FUSE_WRITE: return "write";
    case FUSE_FLUSH: return "flush";
    case FUSE_FSYNC: return "fsync";
    case FUSE_RELEASE: return "release";
    case FUSE_FALLOCATE: return "fallocate";
    case FUSE_LSEEK: return "lseek";
    case FUSE_COPY_FILE_RANGE: return "copy_file_range";
    case FUSE_STATFS: return "statfs";
    case FUSE_SETXATTR: return "setxattr";
    case FUSE_GETXATTR: return "getxattr";
    case FUSE_LISTXATTR: return "listxattr";
    case FUSE_REMOVEXATTR: return "removexattr";
    case FUSE_OPENDIR: return "opendir";
    case FUSE_READDIR: return "readdir";
    case FUSE_READDIRPLUS: return "readdirplus";
    case FUSE_RELEASEDIR: return "releasedir";
    case FUSE_FSYNCDIR: return "fsyncdir";
    case FUSE_GETLK: return "getlk";
    case FUSE_SETLK: return "setlk";
    case FUSE_SETLKW: return "setlkw";
    case FUSE_ACCESS: return "access";
    case FUSE_IOCTL: return "ioctl";
    case FUSE_POLL: return "poll";
    case FUSE_INTERRUPT: return "interrupt";
    case FUSE_INIT: return "init";
    case FUSE_DESTROY: return "destroy";
    default: return "other";
  }
}

}  // namespace ff
