// The kernels as the device's driver takes them (cuModuleLoadData): code for each architecture and
// PTX for later ones. Only where the build had a compiler for them.
#pragma once

extern "C" const unsigned char farandole_fatbin[];
