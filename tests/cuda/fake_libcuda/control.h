// Controls of the fake driver, for tests, beyond CUDA's own functions. Its settings come from the
// environment (FAKE_CUDA_DEVICES=2) or from configure("devices", "2"):
//
//   devices 1   version 99000   capability 90   memory 1073741824   name "Fake GPU"
//   multiprocessors 4   virtual_memory 1   host_register 1
//   peers 1            devices reach each other, seen or not
//   drops ""           "writes:0>1": what device 0 writes to other processes' memory of device 1 is
//                      lost, with commas; "words:0>1": what its streams write (cuStreamBatchMemOp);
//                      "reads:0>1": the same as writes, and it reads zeros there
//   lacks ""           functions that cuGetProcAddress does not find, with commas
//   jitter 0           a seed: streams sleep a little before they do anything
//   memory_operations 1   streams wait for words and write them
//   stream_room 1020      calls that a stream holds before it holds up the next (an H200's driver)
//   mps 1              processes that share a device take no turns there
//   multicast 0        a switch joins the devices (NVLink SHARP)
//   deinitialized 0    every call is answered as at the end of a process
//   fail ""            "cuMemCreate#2=2,cuStreamQuery#1=700": see fail()
//   report ""          a file that gets what misuse() and alive() say when the process ends
#pragma once

#include <cstddef>

namespace farandole::cuda {

struct FakeControl {
  /// As at the beginning of a process. Nothing may be alive.
  void (*reset)();
  void (*configure)(const char* name, const char* value);
  /// The nth call from now (1: the next) does nothing and returns `code`. One after which nothing
  /// works any more leaves the context so.
  void (*fail)(const char* call, int nth, int code);
  /// All contexts fail, as by a kernel that used a wrong address.
  void (*lose)(int code);
  /// Streams stop before their next piece of work, or go on.
  void (*hold)(bool held);
  /// How often a function was called since the log was cleared.
  size_t (*calls)(const char* call);
  /// The calls since then, one a line, in order: "cuMemAlloc_v2" is "cuMemAlloc".
  const char* (*log)();
  void (*clear_log)();
  /// The kernels launched since then, one a line: "name, times, blocks of the last grid".
  const char* (*launches)();
  /// Wrong uses, a sentence a line; also objects that were left when a context ended.
  const char* (*misuse)();
  /// Objects that are alive: "1 context, 2 streams"; empty when none is.
  const char* (*alive)();
  /// Ends all objects and forgets wrong uses, as the end of a process does.
  void (*forget)();
};

extern "C" const FakeControl* fake_cuda_control();

}  // namespace farandole::cuda
